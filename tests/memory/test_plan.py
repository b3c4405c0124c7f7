"""The division of cards among engines: everything fits to the byte, or the first that does not is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_cluster.config.schema import StageConfig
from omni_cluster.memory.devices import Card, cards_of_one_process, cards_of_replicas
from omni_cluster.memory.needs import CacheNeed, EngineNeed, FixedParts, Knob
from omni_cluster.memory.plan import plan_memory, render_memory
from omni_cluster.memory.sizes import GIB
from omni_cluster.types.errors import ConfigError

Sizes = tuple[int, int, int, int]


def need(stage_id: int, fixed: int, least: int = 0, wanted: int = 0, **parts: int) -> EngineNeed:
    cache = CacheNeed(least, max(least, wanted))
    return EngineNeed(stage_id, f"s{stage_id}", FixedParts(fixed, **parts), cache, Knob("max_model_len", 64, 16, 10))


def stage(stage_id: int, **fields: Any) -> StageConfig:
    return StageConfig(stage_id=stage_id, model_stage=f"s{stage_id}", **fields)


engines = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 3)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(engines, st.integers(0, 20_000))
def test_what_is_given_never_exceeds_a_card_and_never_falls_below_the_least(sizes: list[Sizes], spare: int) -> None:
    needs = [need(i, fixed, least, wanted) for i, (fixed, least, wanted, _) in enumerate(sizes)]
    counts = {i: count for i, (*_, count) in enumerate(sizes)}
    exact = sum(n.least * counts[n.stage_id] for n in needs)
    plan = plan_memory(needs, [card := Card("c", exact + spare, counts)])
    assert plan.taken(card) <= card.usable
    for n in needs:
        assert n.cache.least <= plan.engines[n.stage_id].kv_cache <= n.cache.wanted


@settings(deadline=None)
@given(engines)
def test_the_exact_size_fits_and_one_byte_less_does_not(sizes: list[Sizes]) -> None:
    needs = [need(i, fixed + 1, least, wanted) for i, (fixed, least, wanted, _) in enumerate(sizes)]
    counts = {i: count for i, (*_, count) in enumerate(sizes)}
    exact = sum(n.least * counts[n.stage_id] for n in needs)
    plan_memory(needs, [Card("c", exact, counts)])
    with pytest.raises(ConfigError, match=f"stage {needs[-1].stage_id} .* does not fit on c"):
        plan_memory(needs, [Card("c", exact - 1, counts)])


def test_caches_get_what_they_want_where_it_fits_and_else_a_share_in_proportion() -> None:
    needs = [need(0, 100, 10, 600), need(1, 50, 10, 300)]
    roomy = plan_memory(needs, [Card("c", 5000, {0: 1, 1: 1})])
    assert [roomy.engines[i].kv_cache for i in (0, 1)] == [600, 300]
    tight = plan_memory(needs, [Card("c", 600, {0: 1, 1: 1})])
    assert [tight.engines[i].kv_cache for i in (0, 1)] == [300, 150]


def test_a_share_below_the_least_is_raised_to_it_at_the_cost_of_the_others() -> None:
    plan = plan_memory([need(0, 0, 10, 900), need(1, 0, 60, 100)], [Card("c", 200, {0: 1, 1: 1})])
    assert (plan.engines[0].kv_cache, plan.engines[1].kv_cache) == (140, 60)


def test_an_engine_on_two_cards_has_the_smaller_share_on_both() -> None:
    cards = [Card("a", 100, {0: 1}), Card("b", 100, {0: 1, 1: 1})]
    assert plan_memory([need(0, 10, 1, 1000), need(1, 40)], cards).engines[0].kv_cache == 50


def test_each_replica_on_a_card_counts() -> None:
    plan = plan_memory([need(0, 10, 1, 1000)], [card := Card("a", 100, {0: 3})])
    assert plan.engines[0].kv_cache == 23
    assert plan.taken(card) == 99


def test_the_sentence_names_card_stage_parts_and_what_would_fit() -> None:
    big = EngineNeed(
        1,
        "s1",
        FixedParts(weights=3 * GIB, cuda_context=GIB),
        CacheNeed(4 * GIB, 4 * GIB),
        Knob("max_model_len", 64, 16, GIB),
    )
    with pytest.raises(ConfigError) as caught:
        plan_memory([need(0, 2 * GIB), big], [Card("GPU 0", 8 * GIB, {0: 1, 1: 1})])
    assert str(caught.value) == (
        "stage 1 (s1) does not fit on GPU 0 of 8.0 GiB beside s0 2.0: it needs 8.0 GiB (weights 3.0, CUDA context 1.0, "
        "KV cache of its longest sequence 4.0) and 6.0 are left; set its max_model_len to at most 32, "
        "or use another card."
    )


def test_no_setting_is_named_where_none_would_do() -> None:
    with pytest.raises(ConfigError, match=r"0\.0 are left; lower its limits, or use another card"):
        plan_memory([need(0, 500)], [Card("c", 1, {0: 1})])


def test_pinned_cards_hold_all_that_name_them_and_every_replica() -> None:
    stages = [
        stage(0, gpus=[0, 1], tensor_parallel_size=2),
        stage(1, gpus=[1], num_replicas=2),
        stage(2, num_gpus=0),
    ]
    cards = cards_of_replicas(stages, 100)
    assert [(card.name, card.engines) for card in cards] == [("GPU 0", {0: 1}), ("GPU 1", {0: 1, 1: 2})]


def test_shares_that_fill_at_most_one_card_share_it() -> None:
    stages = [stage(i, num_gpus=0.1, num_replicas=count) for i, count in enumerate((4, 3, 3))]
    (card,) = cards_of_replicas(stages, 100)
    assert (card.usable, card.engines) == (100, {0: 4, 1: 3, 2: 3})


def test_shares_of_more_than_one_card_bound_each_replica() -> None:
    stages = [
        stage(0, num_gpus=0.5, autoscaling={"max_replicas": 2, "signals": {"max_requests": 24}}),
        stage(1, num_gpus=0.25),
    ]
    cards = cards_of_replicas(stages, 100)
    assert [(card.usable, card.engines) for card in cards] == [(50, {0: 1}), (25, {1: 1})]


def test_whole_cards_are_a_replicas_own() -> None:
    stages = [stage(0, num_gpus=2, tensor_parallel_size=2, num_replicas=3), stage(1, num_gpus=1)]
    assert [card.engines for card in cards_of_replicas(stages, 100)] == [{0: 1}, {1: 1}]


def test_one_process_runs_each_stage_once_from_its_first_card_on() -> None:
    stages = [
        stage(0, num_gpus=2, tensor_parallel_size=2, num_replicas=2),
        stage(1, num_gpus=0.5),
        stage(2, gpus=[5]),
        stage(3, num_gpus=0),
    ]
    cards = cards_of_one_process(stages, 100, first=2)
    assert {number: card.engines for number, card in cards.items()} == {2: {0: 1, 1: 1}, 3: {0: 1}, 5: {2: 1}}


def test_the_table_has_every_part_and_what_is_left() -> None:
    needs = [need(0, 2 * GIB, GIB, GIB, streams=GIB // 2)]
    assert render_memory(plan_memory(needs, [Card("c", 9 * GIB, {0: 2})])) == (
        "card  stage   engines  weights  activations  streams  CUDA graphs  CUDA context  margin  KV cache  each  GiB\n"
        "c     s0      2        2.0      0.0          0.5      0.0          0.0           0.0     1.0       3.5   7.0\n"
        "c     left                                                                                               2.0\n"
        "c     usable                                                                                             9.0\n"
    )
