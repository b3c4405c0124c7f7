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

from omni_cluster.cluster.loads import HOME_LEAD, LAG_S, LOST_S, SILENT_S, STALE_S, Loads, home_of
from tests.cluster.clock import Clock

REPLICAS = ("a", "b", "c", "d")


def loads(seed: int = 0, clock: Callable[[], float] | None = None) -> Loads:
    return Loads(clock or Clock(), random.Random(seed))


def test_the_less_busy_of_two_by_what_they_say() -> None:
    some = loads()
    some.told("a", 9)
    some.told("b", 2)
    assert [some.choose(["a", "b"]) for _ in range(7)] == ["b"] * 7
    assert {some.choose(["a", "b"]) for _ in range(8)} == {"a", "b"}  # those that were just chosen count


def test_one_replica_is_the_choice_and_unknown_ones_get_equal_shares() -> None:
    some = loads()
    assert some.choose(["only"]) == "only"
    shares = Counter(some.choose(["a", "b"]) for _ in range(40))
    assert set(shares.values()) == {20}


def test_those_that_stand_by_get_nothing_until_another_is_lost_or_kept_free() -> None:
    clock = Clock()
    some = Loads(clock, random.Random(0), serving=2)

    def chosen(replica_ids: Sequence[str] = REPLICAS, **where: Any) -> set[str]:
        names = [some.choose(some.living(replica_ids), **where) for _ in range(20)]
        for name in names:
            some.ended(name)
        return set(names)

    assert chosen() == chosen(REPLICAS[::-1]) == {"a", "b"}
    assert chosen(nearby=[["c"], ["d"]]) == {"a", "b"}
    assert chosen(conversation=b"all of one") <= {"a", "b"}
    some.lost("a")
    assert chosen() == {"b", "c"}
    clock.now_s = LOST_S
    assert chosen() == {"a", "b"}
    some.reserved("b")
    assert chosen() == {"a", "c"}
    assert chosen(["d"]) == {"d"}


def test_a_replica_of_unknown_load_is_compared_by_what_was_given_to_both() -> None:
    some = loads()
    some.told("a", 50)  # all of other processes: of "b" nobody knows
    assert Counter(some.choose(["a", "b"]) for _ in range(10)) == {"a": 5, "b": 5}


def test_what_a_replica_has_said_counts_for_a_while() -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.told("a", 5)
    some.told("b", 0)
    assert some.choose(["a", "b"]) == "b"
    clock.now_s = STALE_S + 1
    assert some.choose(["a", "b"]) == "a"  # "b" has one of ours


def test_a_choice_counts_until_the_replica_says_that_it_has_it() -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.told("a", 0)
    some.choose(["a"])
    assert some._estimate("a") == 1
    clock.now_s = LAG_S / 2
    some.told("a", 0)  # said before the request came
    assert some._estimate("a") == 1
    clock.now_s = 2 * LAG_S
    some.told("a", 1)
    assert some._estimate("a") == 1


def test_a_request_that_ends_before_the_replica_says_that_it_has_it_counts_no_longer() -> None:
    some = loads()
    for replica in ("a", "b"):
        some.told(replica, 0)
    for _ in range(8):  # one after another, and the next report is still to come
        some.ended(chosen := some.choose(["a", "b"], nearby=[["a"], []]))
        assert chosen == "a"
    for _ in range(2):
        some.choose(["a"])
    some.ended("a")
    assert some._estimate("a") == 1  # the other one runs


def test_nothing_is_kept_of_replicas_that_are_gone() -> None:
    some = loads()
    for number in range(100):
        name = f"replica-{number}"
        some.told(name, 1)
        some.choose([name, "stays"])
        some.forget(name)
        for chosen in (name, "stays"):
            while some._of(chosen).own:
                some.ended(chosen)
    assert not some._by_replica


def test_a_choice_of_replicas_that_never_say_anything_keeps_a_bounded_past() -> None:
    clock = Clock()
    some = loads(clock=clock)
    for _ in range(1000):
        clock.now_s += 0.1
        some.choose(["a"])
        some.ended("a")
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
                each.told(replica, length)

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
    """Each replica is on a node of its own, two nodes are a zone; inputs come from all nodes alike."""
    spread, near_share = {}, {}
    for knows_places in (True, False):
        clock, chance, near = Clock(), random.Random(7), Counter[str]()
        of_ingress = [loads(seed, clock) for seed in range(4)]

        def choose(of: Loads, near: Counter[str] = near, chance: random.Random = chance, *, knows: bool) -> str:
            source = chance.randrange(len(REPLICAS))
            zone = REPLICAS[source // 2 * 2 :][:2]
            chosen = of.choose(REPLICAS, nearby=[[REPLICAS[source]], zone] if knows else [])
            near["node"] += chosen == REPLICAS[source]
            near["zone"] += chosen in zone
            near["all"] += 1
            return chosen

        choosers = [functools.partial(choose, of, knows=knows_places) for of in of_ingress]
        spread[knows_places] = mean_spread(choosers, teller(of_ingress), clock, most)
        near_share[knows_places] = near["node"] / near["all"], near["zone"] / near["all"]
    assert near_share[True][0] > 2 * near_share[False][0] and near_share[True][1] > near_share[False][1] + 0.2
    assert spread[True] < 1.1 * spread[False]


def test_a_near_replica_that_is_busier_is_not_chosen() -> None:
    some = loads()
    some.told("a", 4)
    some.told("b", 3)
    assert some.choose(["a", "b"], nearby=[["a"], []]) == "b"
    assert some.choose(["a", "b"], nearby=[["a"], []]) == "a"  # as busy as the other now


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
            some.ended(turns[-1])
        assert len(set(turns)) == 1


def test_conversations_are_spread_and_stay_when_a_replica_goes() -> None:
    homes = {each: home_of(each, REPLICAS) for each in CONVERSATIONS}
    assert min(Counter(homes.values())[replica] for replica in REPLICAS) > len(CONVERSATIONS) / 8
    left = [replica for replica in REPLICAS if replica != "b"]
    assert all(home_of(each, left) == home for each, home in homes.items() if home != "b")


@pytest.mark.parametrize(("more", "stays"), [(HOME_LEAD, True), (HOME_LEAD + 1, False)])
def test_a_conversation_leaves_a_replica_that_is_busier_than_another(more: int, stays: bool) -> None:
    some, home = loads(), home_of(b"talk", ["a", "b"])
    other = "b" if home == "a" else "a"
    some.told(home, 3 + more)
    some.told(other, 3)
    assert (some.choose(["a", "b"], b"talk") == home) is stays


@pytest.mark.parametrize("rest_s", [LOST_S, SILENT_S])
def test_what_was_lost_gets_nothing_for_some_time(rest_s: float) -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.lost("a", rest_s)
    assert some.living(["a", "b"]) == ["b"]
    some.lost("a", rest_s / 2)  # a later, lesser word does not shorten it
    clock.now_s = rest_s * 0.9
    assert some.living(["a", "b"]) == ["b"]
    clock.now_s = rest_s
    assert some.living(["a", "b"]) == ["a", "b"]


def test_idle_is_what_has_no_work_by_its_word_or_by_what_it_was_given_here() -> None:
    some = loads()
    some.told("a", 1)
    some.told("b", 0)
    some.choose(["c"])
    assert some.living(["a", "b", "c", "d"], idle=True) == ["b", "d"]


def test_a_replica_that_is_kept_free_is_passed_over_while_there_is_another() -> None:
    some = loads()
    some.told("a", 0, is_reserved=True)
    for other in ("b", "c"):
        some.told(other, 9)
    conversations = [each for each in CONVERSATIONS if home_of(each, ["a", "b", "c"]) == "a"]
    for ask in [{}, {"nearby": [["a"], ["a", "b"]]}, {"nearby": [["a"], []]}, {"conversation": conversations[0]}]:
        for _ in range(4):
            some.ended(chosen := some.choose(["a", "b", "c"], **ask))  # type: ignore[arg-type]
            assert chosen != "a"
    assert some.choose(["a"]) == "a"
    some.told("b", 9, is_reserved=True)
    assert some.choose(["a", "b"]) == "a"  # none is left that is not: the less busy of them


def test_a_replica_is_kept_free_until_it_says_otherwise_or_nothing() -> None:
    clock = Clock()
    some = loads(clock=clock)
    some.told("a", 0, is_reserved=True)
    some.told("b", 9)
    assert some.choose(["a", "b"]) == "b"
    some.told("a", 0)
    assert some.choose(["a", "b"]) == "a"
    for end in (lambda: setattr(clock, "now_s", clock.now_s + STALE_S), lambda: some.forget("a")):
        some.told("a", 0, is_reserved=True)
        assert some._is_reserved("a")
        end()
        assert not some._is_reserved("a")


def test_the_least_busy_is_kept_free_but_one_is_left() -> None:
    some = loads()
    for replica, load in {"a": 3, "b": 1, "c": 2}.items():
        some.told(replica, load)
    assert some.to_reserve(["a", "b", "c"]) == "b"
    some.reserved("b")
    assert some.to_reserve(["a", "b", "c"]) == "c" and some.to_reserve(["a", "b"]) is None
    some.reserved("c")
    assert some.to_reserve(["a", "b", "c"]) is None
    assert some.to_reserve(["a", "b", "c"], "b") == "b"  # its own


def test_of_those_who_have_asked_for_all_that_lives_one_gives_it_up() -> None:
    some = loads()
    for replica in ("a", "b", "c"):
        some.reserved(replica)
    assert [some.to_reserve(["a", "b", "c"], own) for own in ("a", "b", "c")] == ["a", "b", None]
    assert some.to_reserve(["a", "b"], "c") is None  # it was lost


def test_nothing_is_kept_of_reservations_that_are_over() -> None:
    clock = Clock()
    some = loads(clock=clock)
    for number in range(100):
        some.reserved(f"replica-{number}")
        clock.now_s += STALE_S
    assert len(some._reserved_until_s) == 1
