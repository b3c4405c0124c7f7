"""A request that is begun again: nothing comes twice, nothing is missing, and not for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.engine.recovery import EVENT_S, MOST_FREE, AnswerDiffers, DeliveredOutputs, Loss, RecoverableRequest
from omni_cluster.models.registry import known_families
from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import AudioChunk, ImageChunk, StageChunk, TokenCounts
from tests.configs import TINY_CONFIG

TOKENS = tuple(range(100, 140))
CODES = Codes.of(0, [[number, -number] for number in range(50)])
SOUND = np.arange(5_000, dtype=np.float32)


def chunk(start: int, end: int, **fields: object) -> StageEvent:
    return StageEvent("thinker", StageChunk(start, TOKENS[start:end], **fields))  # type: ignore[arg-type]


def sound(start: int, end: int) -> StageEvent:
    return StageEvent("code2wav", StageChunk(audio=AudioChunk(start, SOUND[start:end], 24_000)))


def pictures(*numbers: int) -> StageEvent:
    return StageEvent("painter", StageChunk(images=tuple(ImageChunk(number, b"png%d" % number) for number in numbers)))


def said(start: int, end: int) -> StageEvent:
    return StageEvent("talker", StageChunk(codes=CODES.between(start, end)))


def pieces(length: int, chance: random.Random) -> list[tuple[int, int]]:
    """The range up to `length` in pieces of any size, as chunks are joined on their way."""
    bounds = [0, *sorted(chance.sample(range(1, length), chance.randint(0, 9))), length]
    return list(itertools.pairwise(bounds))


def mixed(chance: random.Random) -> list[StageEvent]:
    """Chunks of all stages in turn."""
    made = {chunk: len(TOKENS), said: len(CODES), sound: len(SOUND)}
    of_stages = [[event(*piece) for piece in pieces(length, chance)] for event, length in made.items()]
    return [event for events in itertools.zip_longest(*of_stages) for event in events if event is not None]


def test_a_first_run_passes_as_it_is() -> None:
    delivered = DeliveredOutputs()
    events = [chunk(0, 3, text="abc", prompt_token_ids=(1,)), sound(0, 40), chunk(3, 4, finish_reason="stop")]
    assert all(delivered.new(event) is event for event in events)


@pytest.mark.parametrize("seed", range(20))
def test_what_any_number_of_runs_say_is_what_one_says(seed: int) -> None:
    chance, delivered = random.Random(seed), DeliveredOutputs()
    token_ids: list[int] = []
    codes: list[Codes] = []
    samples: list[np.ndarray] = []
    for is_last in (False, False, True):
        events = mixed(chance)
        for event in events if is_last else events[: chance.randint(0, 14)]:
            if (new := delivered.new(event)) is not None:
                assert new.chunk.token_start == len(token_ids) or not new.chunk.token_ids
                token_ids += new.chunk.token_ids
                codes += [] if new.chunk.codes is None else [new.chunk.codes]
                samples += [] if new.chunk.audio is None else [new.chunk.audio.samples]
    assert all(after.start == before.end for before, after in itertools.pairwise(codes))
    assert (
        tuple(token_ids) == TOKENS and Codes.joined(codes) == CODES and np.array_equal(np.concatenate(samples), SOUND)
    )


def test_known_tokens_come_without_text_and_new_ones_with_theirs() -> None:
    delivered = DeliveredOutputs()
    delivered.new(chunk(0, 3, text="abc", prompt_token_ids=(1, 2)))
    assert delivered.new(chunk(0, 3, prompt_token_ids=(1, 2))) is None
    new = delivered.new(chunk(2, 6, text="def"))
    assert new is not None
    assert (new.chunk.token_start, new.chunk.token_ids, new.chunk.text) == (3, TOKENS[3:6], "def")


def test_the_prompt_and_what_of_it_was_cached_are_counted_once() -> None:
    delivered, answer = DeliveredOutputs(), AnswerProgress({"thinker": "text"})
    for end, cached_tokens in ((1, 3), (2, 4)):  # the second run reads what the first one has computed
        new = delivered.new(chunk(0, end, prompt_token_ids=(7,) * 5, cached_tokens=cached_tokens))
        assert new is not None
        answer.add("thinker", new.chunk)
    assert answer.counts == TokenCounts(prompt=5, text=2, codec=0, cached=3)


def test_an_end_comes_once() -> None:
    delivered = DeliveredOutputs()
    delivered.new(chunk(0, 3, finish_reason="length"))
    assert delivered.new(chunk(0, 3, finish_reason="length")) is None
    assert delivered.has_all_of("thinker") and not delivered.has_all_of("code2wav")


def test_pictures_come_once() -> None:
    delivered, first = DeliveredOutputs(), pictures(0, 1)
    assert delivered.new(first) is first and delivered.new(first) is None
    new = delivered.new(pictures(1, 2))
    assert new is not None and new.chunk.images == pictures(2).chunk.images
    assert delivered.known() == {"painter": KnownOutput(num_images=3)}


def test_a_given_reply_comes_once() -> None:
    delivered, reply = DeliveredOutputs(), chunk(0, 9, text="as it was asked", finish_reason="stop")
    assert delivered.new(reply) is reply and delivered.new(reply) is None


@pytest.mark.parametrize(
    "event",
    [
        chunk(5, 6),
        StageEvent("thinker", StageChunk(1, (101, 7, 103))),
        said(21, 30),
        StageEvent("talker", StageChunk(codes=Codes.of(19, [[19, 5], [20, -20]]))),
        sound(901, 950),
        pictures(1),
    ],
    ids=["a gap", "another token", "a gap of codes", "another code", "a gap of sound", "a gap of pictures"],
)
def test_an_answer_that_does_not_go_on_where_it_was_is_refused(event: StageEvent) -> None:
    delivered = DeliveredOutputs()
    delivered.new(chunk(0, 4))
    delivered.new(said(0, 20))
    delivered.new(sound(0, 900))
    with pytest.raises(AnswerDiffers):
        delivered.new(event)


def test_what_is_known_is_what_was_delivered() -> None:
    delivered = DeliveredOutputs()
    assert delivered.known() == {}
    for event in (chunk(0, 4), said(0, 3), sound(0, 900), said(3, 7), chunk(4, 9, finish_reason="stop")):
        delivered.new(event)
    assert delivered.known() == {
        "thinker": KnownOutput(TOKENS[:9], "stop"),
        "talker": KnownOutput(codes=CODES.between(0, 7)),
        "code2wav": KnownOutput(num_samples=900),
    }


def bound(max_restarts: int = 3) -> BoundPipeline:
    config = load_config(TINY_CONFIG, known_families=known_families())
    limits = config.limits.model_copy(update={"max_restarts": max_restarts})
    return bind(config.model_copy(update={"limits": limits}))


@pytest.fixture
def recoverable(tiny: Path) -> RecoverableRequest:
    return RecoverableRequest(bound(), OmniRequest("r", "Hello."))


@pytest.mark.parametrize(
    ("finished", "left"),
    [
        ((), ["thinker", "talker", "code2wav"]),
        (("thinker",), ["thinker", "talker", "code2wav"]),
        (("talker",), ["thinker", "talker", "code2wav"]),
        (("thinker", "talker"), ["talker", "code2wav"]),
        (("talker", "code2wav"), ["thinker"]),
        (("thinker", "code2wav"), ["thinker", "talker"]),
        (("thinker", "talker", "code2wav"), []),
    ],
)
def test_what_has_not_finished_runs_again_and_what_feeds_it(
    recoverable: RecoverableRequest, finished: tuple[str, ...], left: list[str]
) -> None:
    for stage in finished:
        recoverable.new(StageEvent(stage, StageChunk(finish_reason="stop")))
    assert [stage.model_stage for stage in recoverable.stages_left()] == left


def test_a_further_run_has_a_name_of_its_own_and_what_is_known(recoverable: RecoverableRequest) -> None:
    assert recoverable.next_request().request_id == "r" and not recoverable.next_request().known
    recoverable.new(chunk(0, 2))
    assert recoverable.may_begin_again(Loss("talker", "a"), {})
    again = recoverable.next_request()
    assert again.request_id == "r-again1" and again.known == {"thinker": KnownOutput(TOKENS[:2])}


def test_the_first_that_is_new_says_what_was_survived(recoverable: RecoverableRequest) -> None:
    recoverable.new(chunk(0, 2))
    recoverable.may_begin_again(Loss("thinker", "a"), {})
    assert recoverable.new(chunk(0, 2)) is None
    new = recoverable.new(chunk(0, 3))
    assert new is not None and new.recovery is not None
    assert new.recovery.stages == ("thinker",) and new.recovery.stall_s >= 0
    later = recoverable.new(chunk(3, 4))
    assert later is not None and later.recovery is None


def test_all_losses_are_told_that_came_before_anything_was_new_again(recoverable: RecoverableRequest) -> None:
    recoverable.new(chunk(0, 2))
    recoverable.may_begin_again(Loss("thinker", "a"), {})
    recoverable.may_begin_again(Loss("code2wav", "b"), {})
    first = recoverable.new(chunk(0, 3))
    assert first is not None and first.recovery is not None and first.recovery.stages == ("thinker", "code2wav")
    recoverable.may_begin_again(Loss("talker", "c"), {})
    second = recoverable.new(chunk(0, 4))
    assert second is not None and second.recovery is not None and second.recovery.stages == ("talker",)


def test_a_replica_that_had_not_taken_the_request_is_none_that_it_was_recovered_from(
    recoverable: RecoverableRequest,
) -> None:
    """As one that Serve takes away, which is chosen a moment before."""
    assert recoverable.may_begin_again(Loss("talker", "taken away", was_at_work=False), {})
    first = recoverable.new(chunk(0, 2))
    assert first is not None and first.recovery is None
    recoverable.may_begin_again(Loss("talker", "taken away", was_at_work=False), {})
    recoverable.may_begin_again(Loss("thinker", "a"), {})
    second = recoverable.new(chunk(0, 3))
    assert second is not None and second.recovery is not None and second.recovery.stages == ("thinker",)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_it_is_begun_again_so_often_and_no_more(tiny: Path, most: int) -> None:
    recoverable = RecoverableRequest(bound(most), OmniRequest("r", "Hello."))
    assert [recoverable.may_begin_again(Loss("talker", str(i)), {}) for i in range(most + 1)] == [True] * most + [False]


CARD = {"a": 100.0, "b": 100.5, "c": 101.0, "other": 100.2}
"""Replicas that shared a card, by when each was lost."""


def losses_of(stage: str, lost_at_s: Mapping[str, float]) -> list[Loss]:
    return [Loss(stage, replica_id, at_s=at_s) for replica_id, at_s in lost_at_s.items() if replica_id != "other"]


def test_losses_of_one_event_use_up_one_restart(tiny: Path) -> None:
    recoverable = RecoverableRequest(bound(1), OmniRequest("r", "Hello."))
    assert all(recoverable.may_begin_again(loss, CARD) for loss in losses_of("talker", CARD))
    assert not recoverable.may_begin_again(Loss("talker", "d", at_s=200.0), {**CARD, "d": 200.0})


def test_that_others_were_lost_may_be_noticed_after_the_request_s_own(tiny: Path) -> None:
    recoverable, own = RecoverableRequest(bound(2), OmniRequest("r", "Hello.")), losses_of("talker", CARD)
    assert [recoverable.may_begin_again(loss, {}) for loss in own[:2]] == [True, True]
    assert recoverable.may_begin_again(own[2], CARD)


@pytest.mark.parametrize("apart_s", [EVENT_S + 1.1, -EVENT_S - 1.1])
def test_replicas_that_end_one_after_another_are_no_event(tiny: Path, apart_s: float) -> None:
    """It may be the request that ends them. Others that were lost at another time say nothing."""
    recoverable, own = RecoverableRequest(bound(1), OmniRequest("r", "Hello.")), losses_of("talker", CARD)
    lost_at_s = {"a": 100.0, "b": 100.5, "other": 100.5 + apart_s}
    assert [recoverable.may_begin_again(loss, lost_at_s) for loss in own[:2]] == [True, False]


def test_of_two_events_each_uses_up_a_restart(tiny: Path) -> None:
    """The request may be what ends all that share its card."""
    recoverable = RecoverableRequest(bound(1), OmniRequest("r", "Hello."))
    later = {f"{replica_id}-later": at_s + 100 for replica_id, at_s in CARD.items()}
    assert recoverable.may_begin_again(Loss("talker", "a", at_s=100.0), CARD)
    assert not recoverable.may_begin_again(Loss("thinker", "a-later", at_s=200.0), {**CARD, **later})


def test_a_replica_that_refused_the_request_may_be_one_of_the_others(tiny: Path) -> None:
    """Its engine was dead already."""
    recoverable = RecoverableRequest(bound(1), OmniRequest("r", "Hello."))
    lost_at_s = {"a": 100.0, "dead": 100.5, "b": 101.0}
    assert recoverable.may_begin_again(Loss("talker", "a", at_s=100.0), lost_at_s)
    assert recoverable.may_begin_again(Loss("code2wav", "dead", was_at_work=False, at_s=100.5), lost_at_s)
    assert recoverable.may_begin_again(Loss("talker", "b", at_s=101.0), lost_at_s)


def test_even_one_event_costs_a_request_no_more_than_so_many_replicas(tiny: Path) -> None:
    recoverable = RecoverableRequest(bound(1), OmniRequest("r", "Hello."))
    replica_ids = [f"replica-{i}" for i in range(MOST_FREE + 2)]
    lost_at_s = dict.fromkeys([*replica_ids, "other"], 100.0)
    may = [recoverable.may_begin_again(Loss("talker", each, at_s=100.0), lost_at_s) for each in replica_ids]
    assert may == [True] * (MOST_FREE + 1) + [False]


def test_replicas_that_took_no_request_use_up_none_of_its_restarts(recoverable: RecoverableRequest) -> None:
    untaken = [Loss("talker", f"silent-{i}", was_at_work=False) for i in range(MOST_FREE + 1)]
    assert recoverable.may_begin_again(Loss("talker", "a"), {})
    assert [recoverable.may_begin_again(loss, {}) for loss in untaken] == [True] * MOST_FREE + [False]
    assert [recoverable.may_begin_again(Loss("talker", each), {}) for each in "bcd"] == [True, True, False]
    never = RecoverableRequest(bound(max_restarts=0), OmniRequest("r", "Hello."))
    assert not never.may_begin_again(untaken[0], {})
