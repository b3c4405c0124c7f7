from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from omni_cluster.bench.load import (
    NUMBERS_A_CELL,
    Load,
    bursts,
    closed_loop,
    open_loop,
    poisson_arrivals,
    poisson_count,
)
from omni_cluster.bench.mix import Mix
from omni_cluster.bench.speech import recorded
from tests.bench.records import CODES_PER_S, STAGES, Server


def test_a_message_is_the_same_for_its_number_and_another_for_each() -> None:
    load = Load(prompt_tokens=30)
    messages = [load.message(number) for number in range(20)]
    assert messages == [load.message(number) for number in range(20)]
    assert len(set(messages)) == 20
    assert {len(message.split()) for message in messages} == {30}
    assert Load(prompt_tokens=30, seed=1).message(0) != messages[0]


def test_the_lengths_are_both_the_least_and_the_most() -> None:
    sampling = Load(text_tokens=5, codec_tokens=7).sampling(0, STAGES)
    text, codec = sampling["words"], sampling["codes"]
    assert (text["min_tokens"], text["max_tokens"], text["ignore_eos"]) == (5, 5, True)
    assert (codec["min_tokens"], codec["max_tokens"]) == (7, 7)


def test_a_mix_asks_for_lengths_of_its_own_and_speaks_some_prompts() -> None:
    load = Load(mix=Mix(spoken_share=0.5, codes_per_s=CODES_PER_S))
    lengths = [load.lengths(number) for number in range(20)]
    for number, asked in enumerate(lengths):
        text, codec = load.sampling(number, STAGES).values()
        assert (text["min_tokens"], text["max_tokens"]) == (asked.text_tokens, asked.text_tokens)
        assert (codec["min_tokens"], codec["max_tokens"]) == (asked.codec_tokens, asked.codec_tokens)
        spoken = load.speech(number)
        if spoken is None:
            assert asked.spoken_s == 0 and len(load.message(number).split()) == asked.prompt_tokens
        else:
            assert len(spoken) == round(asked.spoken_s * 16_000)
    assert 0 < sum(asked.spoken_s > 0 for asked in lengths) < 20


def test_all_cells_have_the_same_lengths_and_no_prompt_twice() -> None:
    load = Load(mix=Mix(spoken_share=0.5, codes_per_s=CODES_PER_S))
    here, there = range(10), range(NUMBERS_A_CELL, NUMBERS_A_CELL + 10)
    assert [load.lengths(number) for number in here] == [load.lengths(number) for number in there]
    for one, other in zip(here, there, strict=True):
        spoken = load.speech(one), load.speech(other)
        if spoken[0] is None:
            assert load.message(one) != load.message(other)
        else:
            assert spoken[0].tolist() != spoken[1].tolist()  # type: ignore[union-attr]


def test_a_prepared_load_makes_no_recording_when_it_asks() -> None:
    recorded.cache_clear()
    load = Load(mix=Mix(spoken_share=1.0, codes_per_s=CODES_PER_S))
    load.prepare()
    load.speech(0)
    assert (recorded.cache_info().misses, recorded.cache_info().hits) == (1, 1)


def test_the_arrivals_of_a_time_are_those_before_its_end() -> None:
    count = poisson_count(4.0, 60.0, seed=3)
    arrivals = poisson_arrivals(4.0, count + 1, seed=3)
    assert arrivals[count - 1] < 60.0 <= arrivals[count]
    assert count == pytest.approx(240, rel=0.2)
    assert poisson_count(8.0, 30.0, seed=3) == count  # another rate, the same pattern


def test_arrivals_are_poisson_and_equal_for_equal_seeds() -> None:
    arrivals = poisson_arrivals(4.0, 20_000, seed=3)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0.0 and len(arrivals) == 20_000
    assert arrivals == poisson_arrivals(4.0, 20_000, seed=3) != poisson_arrivals(4.0, 20_000, seed=4)
    # Of an exponential distribution mean and deviation are the same, and 1 - 1/e of it is below its mean.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)


async def test_a_closed_loop_keeps_as_many_requests_running_as_it_has_clients() -> None:
    server = Server()
    records = await closed_loop(server.ask, range(10), 3)
    assert sorted(record.number for record in records) == sorted(server.asked) == list(range(10))
    assert max(server.at_once) == 3


async def test_a_client_of_a_closed_loop_waits_for_its_answer() -> None:
    server = Server(holds=True)
    running = asyncio.create_task(closed_loop(server.ask, range(10), 3))
    for _ in range(20):
        await asyncio.sleep(0)
    assert server.asked == [0, 1, 2]
    server.may_end.set()
    assert len(await running) == 10


async def test_a_burst_begins_when_the_last_one_has_ended() -> None:
    server = Server()
    records = await bursts(server.ask, range(7), 3)
    assert [record.number for record in records] == server.asked == list(range(7))
    assert server.at_once == [1, 2, 3, 1, 2, 3, 1]


async def test_an_open_loop_sends_whether_or_not_others_have_ended() -> None:
    server = Server(holds=True)
    arrivals_s = (0.0, 0.02, 0.03, 0.05)
    began_s = asyncio.get_running_loop().time()
    running = asyncio.create_task(open_loop(server.ask, range(4), arrivals_s))
    while len(server.asked) < 4:
        await asyncio.sleep(0.001)
    assert server.asked == [0, 1, 2, 3] and server.at_once == [1, 2, 3, 4]
    due_s = [began_s + at_s for at_s in arrivals_s]
    assert all(sent_s >= due - 0.005 for sent_s, due in zip(server.sent_s, due_s, strict=True))  # never early
    server.may_end.set()
    assert len(await running) == 4
