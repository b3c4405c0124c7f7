"""vLLM's own scheduler and KV cache under requests that take rows: what is held for a request needs none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from omni_cluster.engine.build import bind
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import RowsPush, StageExtra
from omni_cluster.types.rows import HASH_BYTES, PrefixHashes
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.scheduler import OmniScheduler
from tests.engine.stages import pipeline_config, talker_stage, thinker_stage, tight
from tests.rows import rows_of

BLOCK, STEP_TOKENS, LONGEST = 16, 48, 128
PROMPT_BLOCKS = 4
PROMPT = PROMPT_BLOCKS * BLOCK + 5


def named(name: str, blocks: int = PROMPT_BLOCKS) -> PrefixHashes:
    return PrefixHashes(BLOCK, tuple(f"{name}{i}".encode().ljust(HASH_BYTES) for i in range(blocks)))


class Engine:
    """The scheduler of an engine that takes rows, and a model that makes a token of anything."""

    def __init__(self, scheduler: OmniScheduler) -> None:
        self.scheduler = scheduler
        self.computed: dict[str, list[int]] = {}
        init_none_hash(sha256)
        caches = scheduler.kv_cache_manager.enable_caching
        self._hasher = get_request_block_hasher(BLOCK, sha256) if caches else None

    def ask(
        self,
        name: str,
        prefix: PrefixHashes | None,
        hold: str = "",
        start: int = 0,
        rows: int = PROMPT + 40,
        **sampling: Any,
    ) -> Request:
        """Rows of positions `start` to `rows` are there."""
        given = rows_of(start, torch.zeros(rows - start, 2), prefix=prefix)
        extra = StageExtra(name, rows_complete=rows > PROMPT, hold=hold, rows=(given.to_bytes(),))
        return self._ask(extra, [3] * PROMPT, **sampling)

    def ask_without_rows(self, name: str, ids: Sequence[int], codes: Codes | None = None) -> Request:
        return self._ask(StageExtra(name, prompt_codes=codes), ids)

    def _ask(self, extra: StageExtra, ids: Sequence[int], **sampling: Any) -> Request:
        params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling, extra_args=extra.to_extra_args())
        request = Request(extra.key, list(ids), params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, broken: str = "") -> None:
        """`broken`: of whose values the step says that they are not finite."""
        planned = self.scheduler.schedule()
        for new in planned.scheduled_new_reqs:
            self.computed.setdefault(new.req_id, []).append(new.num_computed_tokens)
        again = planned.scheduled_cached_reqs
        for name, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
            if name in again.resumed_req_ids:
                self.computed[name].append(computed)
        names = list(planned.num_scheduled_tokens)
        made = [self._made(name, planned.num_scheduled_tokens[name]) for name in names]
        places = {name: i for i, name in enumerate(names)}
        nans = {broken: 1} if broken else None
        self.scheduler.update_from_output(planned, ModelRunnerOutput(names, places, made, num_nans_in_logits=nans))

    def _made(self, name: str, scheduled: int) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def run(self) -> None:
        while self.scheduler.get_num_unfinished_requests():
            self.step()

    def leave(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def counts(self) -> dict[str, int]:
        return self.scheduler.omni_counts()


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(tiny: Path) -> Make:
    def made(num_blocks: int = 40, has_residual_codes: bool = False, **engine_args: Any) -> Engine:
        talker = talker_stage(**{**tight(STEP_TOKENS), "max_model_len": LONGEST, "block_size": BLOCK, **engine_args})
        config = pipeline_config(thinker_stage(), talker)
        spec = cast(ARSpec, bind(config).family.specs["talker"])
        vllm_config = OmniEngineArgs.for_ar_stage(talker, config, str(tiny), spec).create_engine_config()
        vllm_config.additional_config["omni"]["has_residual_codes"] = has_residual_codes
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        caches = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        return Engine(OmniScheduler(vllm_config, caches, StructuredOutputManager(vllm_config), block_size=BLOCK))

    return made


def test_blocks_of_an_earlier_prompt_are_held_and_need_no_rows(make: Make) -> None:
    engine = make()
    engine.ask("first", named("a"))
    engine.run()
    assert engine.scheduler.hold_prefix("hold", named("a")) == PROMPT_BLOCKS
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == PROMPT_BLOCKS
    engine.ask("second", named("a"), "hold", start=PROMPT_BLOCKS * BLOCK)
    engine.run()
    assert engine.computed == {"first": [0], "second": [PROMPT_BLOCKS * BLOCK]}
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == 0


def test_what_is_held_is_read_though_the_request_asks_not_to_read_the_cache(make: Make) -> None:
    """It has no rows for it."""
    engine = make()
    fill(engine, "a")
    engine.scheduler.hold_prefix("hold", named("a"))
    start = PROMPT_BLOCKS * BLOCK
    engine.ask("held", named("a"), "hold", start=start, skip_reading_prefix_cache=True)
    engine.ask("not held", named("a"), skip_reading_prefix_cache=True)
    engine.run()
    assert (engine.computed["held"], engine.computed["not held"]) == ([start], [0])


def test_prompts_of_other_names_share_nothing_though_their_tokens_are_the_same(make: Make) -> None:
    engine = make()
    engine.ask("first", named("a"))
    engine.ask("of no name", None)
    engine.run()
    assert engine.scheduler.hold_prefix("hold", named("b")) == 0
    for name, prefix in (("second", named("b")), ("also of no name", None)):
        engine.ask(name, prefix)
        engine.run()
    assert set(map(tuple, engine.computed.values())) == {(0,)}


@pytest.mark.parametrize("has_residual_codes", [False, True])
def test_a_reply_is_shared_by_its_ids_unless_they_have_residual_codes(make: Make, has_residual_codes: bool) -> None:
    engine = make(has_residual_codes=has_residual_codes)
    first = engine.ask_without_rows("first", [3] * PROMPT)
    engine.run()
    engine.ask_without_rows("second", first.all_token_ids)
    engine.run()
    assert engine.computed == {"first": [0], "second": [(PROMPT_BLOCKS + (not has_residual_codes)) * BLOCK]}
    assert engine.counts["kv_blocks_used"] == 0


def test_prompts_with_codes_share_nothing_by_their_ids(make: Make) -> None:
    engine = make(has_residual_codes=True)
    for name, residual in (("first", 1), ("second", 2)):
        engine.ask_without_rows(name, [3] * PROMPT, Codes.of(1, [[3, residual]]))
        engine.run()
    assert engine.computed == {"first": [0], "second": [0]}


def test_what_two_prompts_begin_with_is_shared_up_to_where_they_part(make: Make) -> None:
    engine = make()
    engine.ask("first", named("a"))
    engine.run()
    other = PrefixHashes(BLOCK, (*named("a").hashes[:2], *named("b").hashes[2:]))
    assert engine.scheduler.hold_prefix("hold", other) == 2


def test_a_reply_is_shared_with_nobody(make: Make) -> None:
    engine = make()
    first = engine.ask("first", named("a"))
    engine.run()
    assert first.num_tokens >= (PROMPT_BLOCKS + 1) * BLOCK
    longer = PrefixHashes(BLOCK, (*named("a").hashes, *first.block_hashes[PROMPT_BLOCKS:]))
    second = engine.ask("second", longer)
    engine.run()
    assert engine.computed["second"] == [PROMPT_BLOCKS * BLOCK]
    assert first.block_hashes[PROMPT_BLOCKS:] and not set(first.block_hashes[PROMPT_BLOCKS:]) & set(
        second.block_hashes[PROMPT_BLOCKS:]
    )


def test_of_a_reply_nothing_stays_in_the_cache(make: Make) -> None:
    engine = make()
    pool = engine.scheduler.kv_cache_manager.block_pool
    asked = [engine.ask(name, prefix) for name, prefix in (("a", named("a")), ("no name", None))]
    engine.step()
    engine.leave("no name")
    engine.run()
    assert asked[0].num_tokens >= (PROMPT_BLOCKS + 1) * BLOCK
    cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
    assert len(cached) == PROMPT_BLOCKS and engine.scheduler.hold_prefix("hold", named("a")) == PROMPT_BLOCKS


def fill(engine: Engine, names: Sequence[str]) -> None:
    for name in names:
        engine.ask(name, named(name))
        engine.run()


def test_held_blocks_outlast_others_that_need_the_memory(make: Make) -> None:
    engine = make(num_blocks=20)
    fill(engine, ["a"])
    assert engine.scheduler.hold_prefix("hold", named("a")) == PROMPT_BLOCKS
    fill(engine, "bcdefgh")
    engine.ask("again", named("a"), "hold", start=PROMPT_BLOCKS * BLOCK)
    engine.run()
    assert engine.computed["again"] == [PROMPT_BLOCKS * BLOCK]
    fill(engine, "bcdefgh")
    assert engine.scheduler.hold_prefix("later", named("a")) == 0


def test_no_more_is_held_than_leaves_room_for_the_longest_request(make: Make) -> None:
    longest = -(-(LONGEST + 7) // BLOCK)  # with what a step of eight codes looks ahead
    engine = make(num_blocks=1 + longest + PROMPT_BLOCKS + 1)
    fill(engine, "ab")
    assert [engine.scheduler.hold_prefix(name, named(name)) for name in "ab"] == [PROMPT_BLOCKS, 1]
    assert engine.scheduler.hold_prefix("shares", named("b")) == 1
    assert engine.counts["held_blocks"] == PROMPT_BLOCKS + 1
    for name in ("a", "b", "shares"):
        engine.scheduler.release_prefix(name)
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == 0


def test_what_several_hold_is_counted_once_and_held_until_the_last_of_them_lets_go(make: Make) -> None:
    longest = -(-(LONGEST + 7) // BLOCK)
    engine = make(num_blocks=1 + longest + PROMPT_BLOCKS)
    fill(engine, "a")
    assert [engine.scheduler.hold_prefix(name, named("a")) for name in ("x", "y", "z")] == [PROMPT_BLOCKS] * 3
    for name in ("x", "z"):
        engine.scheduler.release_prefix(name)
        assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == PROMPT_BLOCKS
    engine.scheduler.release_prefix("y")
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == 0


def test_what_is_held_outlasts_a_neighbour_whose_values_are_not_finite_and_no_longer(make: Make) -> None:
    engine = make()
    fill(engine, "a")
    start = PROMPT_BLOCKS * BLOCK
    engine.ask("broken", named("a"))
    engine.step()
    for name in ("waits", "leaves"):
        assert engine.scheduler.hold_prefix(name, named("a")) == PROMPT_BLOCKS
    engine.step(broken="broken")
    assert engine.scheduler.hold_prefix("comes later", named("a")) == 0
    engine.scheduler.release_prefix("leaves")
    engine.ask("waits", named("a"), "waits", start=start)
    engine.run()
    engine.ask("after", named("a"))
    engine.run()
    assert engine.computed == {"a": [0], "broken": [start], "waits": [start], "after": [0]}
    assert engine.scheduler.hold_prefix("after", named("a")) == PROMPT_BLOCKS
    engine.scheduler.release_prefix("after")
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == 0


def test_of_a_request_alone_no_row_is_computed_that_has_not_come(make: Make) -> None:
    """vLLM gives it larger steps than `long_prefill_token_threshold`."""
    engine = make(long_prefill_token_threshold=BLOCK)
    engine.ask("alone", None, rows=BLOCK + 4)
    engine.step()
    assert not engine.computed and engine.counts["blocked"] == 1
    engine.scheduler.push_rows([RowsPush("alone", rows_of(BLOCK + 4, torch.zeros(80, 2)).to_bytes(), complete=True)])
    engine.run()
    assert engine.computed == {"alone": [0]}


def test_who_leaves_before_or_after_its_request_came_holds_nothing(make: Make) -> None:
    engine = make()
    fill(engine, "a")
    engine.scheduler.hold_prefix("before", named("a"))
    engine.scheduler.release_prefix("before")
    engine.scheduler.release_prefix("before")
    engine.scheduler.hold_prefix("after", named("a"))
    engine.ask("after", named("a"), "after", start=PROMPT_BLOCKS * BLOCK)
    engine.step()
    engine.leave("after")
    engine.step()
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == engine.counts["row_counts"] == 0


def test_a_request_whose_later_rows_are_missing_is_held_behind_what_it_needs_no_rows_for(make: Make) -> None:
    engine = make()
    fill(engine, "a")
    engine.scheduler.hold_prefix("hold", named("a"))
    start = PROMPT_BLOCKS * BLOCK
    engine.ask("late", named("a"), "hold", start=start, rows=start + 2)
    engine.step()
    assert "late" not in engine.computed and engine.counts["blocked"] == 1
    rows = rows_of(start + 2, torch.zeros(30, 2)).to_bytes()
    assert engine.scheduler.push_rows([RowsPush("late", rows, complete=True)]) == [None]
    engine.run()
    assert engine.computed["late"] == [start]


@pytest.mark.parametrize("come", [STEP_TOKENS, STEP_TOKENS + BLOCK, PROMPT_BLOCKS * BLOCK])
def test_of_a_hit_no_more_is_read_than_leaves_a_step_whose_rows_have_come(make: Make, come: int) -> None:
    """All rows come, but in parts, and what the cache has reaches as far as the first of these."""
    engine = make()
    fill(engine, "a")
    engine.ask("parts", named("a"), rows=come)
    engine.step()
    (hit,) = engine.computed["parts"]
    assert hit == (come - STEP_TOKENS) // BLOCK * BLOCK
    rows = rows_of(come, torch.zeros(PROMPT + 40 - come, 2)).to_bytes()
    engine.scheduler.push_rows([RowsPush("parts", rows, complete=True)])
    engine.run()


def test_a_request_that_is_preempted_finds_its_blocks_again(make: Make) -> None:
    """Twelve at once need more memory than there is; each of them goes on behind what is held for it."""
    engine = make(num_blocks=24)
    fill(engine, "ab")
    start = PROMPT_BLOCKS * BLOCK
    for number in range(12):
        name = "ab"[number % 2]
        held = engine.scheduler.hold_prefix(f"hold-{number}", named(name)) * BLOCK
        engine.ask(f"{number}", named(name), f"hold-{number}" if held else "", start=held)
    engine.run()
    assert engine.counts["preemptions"] > 0
    resumed = [computed for computed in engine.computed.values() if len(computed) > 1]
    assert resumed and any(each[0] == start for each in resumed)
    assert all(min(each) >= each[0] or each[0] == 0 for each in resumed)
    assert engine.counts["held_blocks"] == engine.counts["kv_blocks_used"] == 0


def test_without_a_prefix_cache_or_with_blocks_of_another_size_nothing_is_held(make: Make) -> None:
    engine = make(enable_prefix_caching=False)
    fill(engine, "a")
    assert engine.scheduler.hold_prefix("hold", named("a")) == 0
    engine = make()
    other = PrefixHashes(2 * BLOCK, named("a").hashes)
    for name in ("first", "second"):
        engine.ask(name, other)
        engine.run()
        assert engine.scheduler.hold_prefix("hold", other) == 0
    assert engine.computed == {"first": [0], "second": [0]}
