"""Which replica a new request goes to, by what the replicas say and what was chosen here since."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import pytest

from omni_cluster.cluster.loads import AFFINITY_LEAD, LAG_S, LOST_COOLDOWN_S, SILENT_COOLDOWN_S, STALE_S, Loads, home_of
from tests.cluster.clock import Clock

REPLICAS = ("a", "b", "c", "d")


def loads(seed: int = 0, clock: Callable[[], float] | None = None) -> Loads:
    return Loads(clock or Clock(), random.Random(seed))


def test_the_less_busy_of_two_by_what_they_say() -> None:
    some = loads()
    some.on_report("a", 9)
    some.on_report("b", 2)
    assert [some.choose(["a", "b"]) for _ in range(7)] == ["b"] * 7
    assert {some.choose(["a", "b"]) for _ in range(8)} == {"a", "b"}  # those that were just chosen count


def test_one_replica_is_the_choice_and_unknown_ones_get_equal_shares() -> None:
    some = loads()
    assert some.choose(["only"]) == "only"
    shares = Counter(some.choose(["a", "b"]) for _ in range(40))
    assert set(shares.values()) == {20}


def test_those_that_stand_by_get_nothing_until_another_is_lost() -> None:
    clock = Clock()
    some = Loads(clock, random.Random(0), serving=2)

    def chosen(replica_ids: Sequence[str] = REPLICAS, **where: Any) -> set[str]:
        names = [some.choose(some.living(replica_ids), **where) for _ in range(20)]
        for name in names:
            some.on_end(name)
        return set(names)

    assert chosen() == chosen(REPLICAS[::-1]) == {"a", "b"}
    assert chosen(near=["c"]) == {"a", "b"}
    assert chosen(conversation=b"all of one") <= {"a", "b"}
    some.on_loss("a")
    assert chosen() == {"b", "c"}
    clock.now_s = LOST_COOLDOWN_S
    assert chosen() == {"a", "b"}
    assert chosen(["d"]) == {"d"}


def test_a_replica_of_unknown_load_is_compared_by_what_was_given_to_both() -> None:
    some = loads()
    some.on_report("a", 50)  # all of other processes: of "b" nobody knows
    assert Counter(some.choose(["a", "b"]) for _ in range(10)) == {"a": 5, "b": 5}


def test_what_a_replica_has_said_counts_for_a_while() -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.on_report("a", 5)
    some.on_report("b", 0)
    assert some.choose(["a", "b"]) == "b"
    clock.now_s = STALE_S + 1
    assert some.choose(["a", "b"]) == "a"  # "b" has one of ours


def test_a_choice_counts_until_the_replica_says_that_it_has_it() -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.on_report("a", 0)
    some.choose(["a"])
    assert some._estimate("a") == 1
    clock.now_s = LAG_S / 2
    some.on_report("a", 0)  # said before the request came
    assert some._estimate("a") == 1
    clock.now_s = 2 * LAG_S
    some.on_report("a", 1)
    assert some._estimate("a") == 1


def test_a_request_that_ends_before_the_replica_says_that_it_has_it_counts_no_longer() -> None:
    some = loads()
    for replica in ("a", "b"):
        some.on_report(replica, 0)
    for _ in range(8):  # one after another, and the next report is still to come
        some.on_end(chosen := some.choose(["a", "b"], near=["a"]))
        assert chosen == "a"
    for _ in range(2):
        some.choose(["a"])
    some.on_end("a")
    assert some._estimate("a") == 1  # the other one runs


def test_nothing_is_kept_of_replicas_that_are_gone() -> None:
    some = loads()
    for number in range(100):
        name = f"replica-{number}"
        some.on_report(name, 1)
        some.choose([name, "stays"])
        some.on_disconnect(name)
        for chosen in (name, "stays"):
            while some._of(chosen).own:
                some.on_end(chosen)
    assert not some._by_replica


def test_a_choice_of_replicas_that_never_say_anything_keeps_a_bounded_past() -> None:
    clock = Clock()
    some = loads(clock=clock)
    for _ in range(1000):
        clock.now_s += 0.1
        some.choose(["a"])
        some.on_end("a")
    assert not some._by_replica


STEP_S = 0.01
TELL_S = 0.1


def mean_spread(choosers: list[Callable[[], str]], tell: Callable[[list[int]], None], clock: Clock, most: int) -> float:
    """Bursts of 1 to `most` requests at each ingress at once; what the longest queue was above the mean of all."""
    chance = random.Random(5)
    queues: list[list[float]] = [[] for _ in REPLICAS]  # when each request there ends
    now_s, spread = 0.0, []
    for step in range(3000):
        now_s = step * STEP_S
        queues = [[end_s for end_s in queue if end_s > now_s] for queue in queues]
        clock.now_s = now_s
        if step % round(TELL_S / STEP_S) == 0:
            tell([len(queue) for queue in queues])
        if step % 25 == 0:
            for choose in choosers:
                for _ in range(chance.randint(1, most)):
                    length_s = chance.choice((0.2, 0.2, 0.2, 3.0))
                    queues[REPLICAS.index(choose())].append(now_s + length_s)
        lengths = [len(queue) for queue in queues]
        spread.append(max(lengths) - mean(lengths))
    return mean(spread)


def teller(of_ingress: list[Loads]) -> Callable[[list[int]], None]:
    """Tells all of them how long the queues are."""

    def tell(lengths: list[int]) -> None:
        for each in of_ingress:
            for replica, length in zip(REPLICAS, lengths, strict=True):
                each.on_report(replica, length)

    return tell


@pytest.mark.parametrize("most", [1, 4])
def test_four_ingresses_spread_their_bursts_better_than_in_turn(most: int) -> None:
    clock = Clock()
    of_ingress = [loads(seed, clock) for seed in range(4)]
    by_load = [lambda of=of: of.choose(REPLICAS) for of in of_ingress]
    in_turn = [itertools.cycle(REPLICAS).__next__ for _ in of_ingress]
    chosen = mean_spread(by_load, teller(of_ingress), clock, most)
    turned = mean_spread(in_turn, lambda lengths: None, clock, most)
    assert chosen < 0.7 * turned, (chosen, turned)


@pytest.mark.parametrize("most", [1, 4])
def test_a_replica_near_the_source_is_chosen_where_it_costs_no_wait(most: int) -> None:
    """Each replica is on a node of its own; inputs come from all nodes alike."""
    spread, near_share = {}, {}
    for knows_places in (True, False):
        clock, chance, near = Clock(), random.Random(7), Counter[str]()
        of_ingress = [loads(seed, clock) for seed in range(4)]

        def choose(of: Loads, near: Counter[str] = near, chance: random.Random = chance, *, knows: bool) -> str:
            source = chance.randrange(len(REPLICAS))
            chosen = of.choose(REPLICAS, near=[REPLICAS[source]] if knows else [])
            near["node"] += chosen == REPLICAS[source]
            near["all"] += 1
            return chosen

        choosers = [functools.partial(choose, of, knows=knows_places) for of in of_ingress]
        spread[knows_places] = mean_spread(choosers, teller(of_ingress), clock, most)
        near_share[knows_places] = near["node"] / near["all"]
    assert near_share[True] > 2 * near_share[False]
    assert spread[True] < 1.1 * spread[False]


def test_a_near_replica_that_is_busier_is_not_chosen() -> None:
    some = loads()
    some.on_report("a", 4)
    some.on_report("b", 3)
    assert some.choose(["a", "b"], near=["a"]) == "b"
    assert some.choose(["a", "b"], near=["a"]) == "a"  # as busy as the other now


def test_a_burst_at_ingresses_that_know_nothing_yet_is_spread() -> None:
    shares = Counter(
        chosen for of in (loads(seed) for seed in range(4)) for chosen in [of.choose(REPLICAS) for _ in range(16)]
    )
    assert sum(shares.values()) == 64 and max(shares.values()) - min(shares.values()) <= 8


def test_one_request_at_each_of_many_ingresses_does_not_meet_at_one_replica() -> None:
    firsts = Counter(loads(seed).choose(REPLICAS) for seed in range(64))
    assert set(firsts) == set(REPLICAS) and max(firsts.values()) < 32  # in turn from the same start: all 64


CONVERSATIONS = [f"conversation {i}".encode() for i in range(200)]


def test_a_conversations_turns_go_to_one_replica_whichever_process_chooses() -> None:
    for conversation in CONVERSATIONS[:20]:
        turns = []
        for process in range(4):
            some = loads(seed=process)
            turns.append(some.choose(REPLICAS[process:] + REPLICAS[:process], conversation))
            some.on_end(turns[-1])
        assert len(set(turns)) == 1


def test_conversations_are_spread_and_stay_when_a_replica_goes() -> None:
    homes = {each: home_of(each, REPLICAS) for each in CONVERSATIONS}
    assert min(Counter(homes.values())[replica] for replica in REPLICAS) > len(CONVERSATIONS) / 8
    left = [replica for replica in REPLICAS if replica != "b"]
    assert all(home_of(each, left) == home for each, home in homes.items() if home != "b")


@pytest.mark.parametrize(("more", "stays"), [(AFFINITY_LEAD, True), (AFFINITY_LEAD + 1, False)])
def test_a_conversation_leaves_a_replica_that_is_busier_than_another(more: int, stays: bool) -> None:
    some, home = loads(), home_of(b"talk", ["a", "b"])
    other = "b" if home == "a" else "a"
    some.on_report(home, 3 + more)
    some.on_report(other, 3)
    assert (some.choose(["a", "b"], b"talk") == home) is stays


@pytest.mark.parametrize("cooldown_s", [LOST_COOLDOWN_S, SILENT_COOLDOWN_S])
def test_what_was_lost_gets_nothing_for_some_time(cooldown_s: float) -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.on_loss("a", cooldown_s)
    assert some.living(["a", "b"]) == ["b"]
    some.on_loss("a", cooldown_s / 2)  # a later, lesser word does not shorten it
    clock.now_s = cooldown_s * 0.9
    assert some.living(["a", "b"]) == ["b"]
    clock.now_s = cooldown_s
    assert some.living(["a", "b"]) == ["a", "b"]
