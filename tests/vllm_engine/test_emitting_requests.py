"""vLLM's own scheduler and prefix cache under requests that emit rows; the model is a line of arithmetic."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.schema import StageConfig
from omni_cluster.engine.build import bind
from omni_cluster.models.stage_spec import ARSpec, RowsAt
from omni_cluster.types.inputs import StageExtra
from omni_cluster.types.rows import PrefixHashes, Rows
from omni_cluster.vllm_engine import scheduler as scheduler_module
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.output_processor import RowsSink
from omni_cluster.vllm_engine.rows_at import prompt_mask, unless_all
from omni_cluster.vllm_engine.scheduler import OmniAsyncScheduler, OmniScheduler, OmniSchedulerMixin
from tests.engine.stages import pipeline_config, talker_stage, thinker_stage, tight
from tests.rows import rows_of as packed_of

BLOCK, STEP_TOKENS, NUM_BLOCKS = 16, 48, 20
ROW_BYTES = 2 * 4
BLOCK_BYTES = BLOCK * ROW_BYTES


def next_token(tokens: list[int]) -> int:
    return (3 * tokens[-1] + len(tokens)) % 97


def rows_of(tokens: list[int], first: int, end: int) -> torch.Tensor:
    """Of a position: what stands before it, and its own token."""
    return torch.tensor([[float(sum(tokens[:p])), float(tokens[p])] for p in range(first, end)]).view(-1, 2)


def mask_of(rows_at: RowsAt, length: int, _: object = ()) -> np.ndarray | None:
    """As if every second 20 positions of a prompt were media: some blocks have none, some have a few."""
    return np.arange(length) // 20 % 2 == 1 if rows_at == "media" else prompt_mask(rows_at, length, ())


@dataclass
class Asked:
    """`tokens`: what the model knows; with steps in flight the scheduler's request has fewer.

    `mask`: see `prompt_mask`.
    """

    request: Request
    emits: bool
    tokens: list[int]
    mask: np.ndarray | None
    sink: RowsSink = field(default_factory=RowsSink)
    rows: list[Rows] = field(default_factory=list)

    def assert_whole(self) -> None:
        """All rows came, in order and once, the prompt's positions with the first of them."""
        assert list(self.request.all_token_ids) == self.tokens
        got = Rows.joined(self.rows)
        mask = np.ones(len(self.tokens) - 1, np.bool_) if self.mask is None else self.mask
        assert (got.start, got.end) == (0, len(mask))
        assert np.array_equal(got.at, np.flatnonzero(mask))
        assert torch.equal(got.tensor(), rows_of(self.tokens, 0, got.end)[mask])
        assert got.positions is not None and got.positions.shape[1] == self.request.num_prompt_tokens
        assert all(chunk.positions is None for chunk in self.rows[1:])


class Engine:
    """The scheduler, and what is around it in a process: a model, and who takes the rows.

    `lag`: steps that are planned before the scheduler is told what came of the one before.
    """

    def __init__(self, scheduler: OmniSchedulerMixin, lag: int, rows_at: RowsAt) -> None:
        self.scheduler = scheduler
        self._rows_at = rows_at
        self.open: dict[str, Asked] = {}
        self.hits = self.hits_again = self.left_out = 0
        self._lag = lag
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._begun: set[str] = set()
        self._prefixes: dict[str, PrefixHashes] = {}
        self.hash_with(sha256)

    def hash_with(self, hashed: Callable[[Any], bytes]) -> None:
        init_none_hash(hashed)
        caches = self.scheduler.kv_cache_manager.enable_caching
        self._hasher = get_request_block_hasher(BLOCK, hashed) if caches else None

    def ask(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 4,
        emit_rows: bool = True,
        given_tokens: int = 0,
        known: tuple[int, ...] = (),
    ) -> Asked:
        extra = StageExtra(name, emit_rows=emit_rows, given_tokens=given_tokens, known=known)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra.to_extra_args())
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher)
        self.open[name] = Asked(request, emit_rows, [*prompt, *known], mask_of(self._rows_at, len(prompt)))
        self.scheduler.add_request(request)
        return self.open[name]

    def leave(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.open[name]

    def step(self) -> int:
        """Returns how many positions it computes."""
        planned = self.scheduler.schedule()
        self._in_flight.append((planned, self._computed(planned)))
        while len(self._in_flight) > (self._lag if planned.num_scheduled_tokens else 0):
            made = self.scheduler.update_from_output(*self._in_flight.popleft())
            for output in made[0].outputs if made else ():
                self._take(output.request_id, output.pooling_output)
        return planned.total_num_scheduled_tokens

    def _computed(self, planned: SchedulerOutput) -> ModelRunnerOutput:
        cached = planned.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        self._begun |= {*starts, *cached.resumed_req_ids}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.hits += sum(starts[r] > 0 and self.open[r].emits for r in starts if r not in cached.req_ids)
        self.hits_again += sum(starts[r] > 0 and self.open[r].emits for r in cached.resumed_req_ids)
        self._prefixes |= planned.omni_prefixes
        made = [self._of(r, start, start + planned.num_scheduled_tokens[r]) for r, start in starts.items()]
        places = {r: i for i, r in enumerate(starts)}
        return ModelRunnerOutput(list(starts), places, [t for t, _ in made], pooler_output=[p for _, p in made])

    def _of(self, name: str, start: int, end: int) -> tuple[list[int], torch.Tensor | None]:
        asked = self.open[name]
        rows = rows_of(asked.tokens, start, end)
        sampled = [next_token(asked.tokens)] if end == len(asked.tokens) else []
        asked.tokens += sampled
        if not asked.emits or (asked.mask is not None and start >= len(asked.mask)):
            return sampled, None
        mask = None if asked.mask is None else asked.mask[start:end]
        if mask is not None:
            rows = rows[: len(mask)][mask]
        positions = torch.zeros(3, asked.request.num_prompt_tokens, dtype=torch.int64) if name in self._begun else None
        prefix = self._prefixes.pop(name, None)
        self._begun.discard(name)
        made = packed_of(start, rows, positions, prefix=prefix, mask=unless_all(mask))
        return sampled, torch.from_numpy(made.pack())

    def _take(self, name: str, packed: torch.Tensor | None) -> None:
        asked = self.open[name]
        if packed is not None:
            asked.sink.put(Rows.unpack(packed.numpy(), max_elements=1 << 20))
            taken = asked.sink.take()
            asked.rows += [] if taken is None else [self._whole(taken)] if not asked.rows else [taken]

    def _whole(self, first: Rows) -> Rows:
        """With the rows that were left out, as who lacks them asks for them."""
        if first.start == 0:
            return first
        self.left_out += first.start
        assert first.prefix is not None
        raw = self.scheduler.find_rows(first.prefix.hashes[: first.start // BLOCK])
        assert raw is not None
        return first.preceded_by([np.frombuffer(raw, np.uint8).reshape(first.start, -1)])

    def run(self) -> int:
        """Until all that was asked is answered; how many positions were computed for it."""
        computed = 0
        while self.scheduler.has_unfinished_requests():
            computed += self.step()
        return computed


Make = Callable[..., Engine]


@pytest.fixture
def make(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(
        kept_rows_bytes: int = 1 << 20,
        lag: int = 0,
        least_left_out: int = BLOCK,
        talker: StageConfig | None = None,
        rows_at: RowsAt = "all",
        **engine_args: Any,
    ) -> Engine:
        thinker = thinker_stage(**tight(STEP_TOKENS), **engine_args)
        config = pipeline_config(thinker, talker, handover=HandoverConfig(kept_rows_bytes=kept_rows_bytes))
        thinker_spec = cast(ARSpec, bind(config).family.specs["thinker"])
        monkeypatch.setattr(type(thinker_spec), "rows_at", rows_at)
        vllm_config = OmniEngineArgs.for_ar_stage(thinker, config, str(tiny), thinker_spec).create_engine_config()
        vllm_config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        caches = KVCacheConfig(NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        kind = OmniAsyncScheduler if lag else OmniScheduler
        monkeypatch.setattr(scheduler_module, "LEAST_LEFT_OUT", least_left_out)
        monkeypatch.setattr(scheduler_module, "prompt_mask", mask_of)
        scheduler = kind(vllm_config, caches, StructuredOutputManager(vllm_config), block_size=BLOCK)
        return Engine(scheduler, lag, rows_at)

    return made


TURNS = 100
PROMPT = [7 * i % 89 for i in range(60)]


def test_a_later_turn_computes_only_what_is_new_and_sends_all_rows(make: Make) -> None:
    engine = make()
    first = engine.ask("first", PROMPT, max_tokens=8)
    assert engine.run() == len(PROMPT) + 7
    second = engine.ask("second", [*first.tokens, 1, 2, 3], max_tokens=4)
    assert engine.run() == len(PROMPT) + 8 + 3 - 4 * BLOCK + 3
    for asked in (first, second):
        asked.assert_whole()


@pytest.mark.parametrize(("least_left_out", "left_out"), [(BLOCK, 3 * BLOCK), (4 * BLOCK, 0)])
def test_rows_of_an_earlier_prompt_are_left_out_and_those_of_its_reply_are_sent(
    make: Make, least_left_out: int, left_out: int
) -> None:
    engine = make(least_left_out=least_left_out)
    first = engine.ask("first", PROMPT, max_tokens=8)
    engine.run()
    second = engine.ask("second", [*first.tokens, 1, 2, 3], max_tokens=4)
    engine.run()
    second.assert_whole()
    assert engine.left_out == left_out


def test_all_rows_are_sent_to_who_keeps_nothing_of_an_earlier_prompt(make: Make) -> None:
    engine = make(talker=talker_stage(enable_prefix_caching=False))
    for turn in range(2):
        asked = engine.ask(f"turn-{turn}", PROMPT)
        engine.run()
        asked.assert_whole()
    assert (engine.hits, engine.left_out) == (1, 0)


def test_rows_of_a_given_reply_are_sent_again(make: Make) -> None:
    """They are no part of the prompt of who reads them, who keeps nothing of a reply."""
    engine = make()
    for turn in range(2):
        asked = engine.ask(f"turn-{turn}", PROMPT, given_tokens=len(PROMPT) - BLOCK - 1)
        engine.run()
        asked.assert_whole()
    assert (engine.hits, engine.left_out) == (1, BLOCK)


def test_two_engines_give_the_blocks_of_one_prompt_other_names(make: Make) -> None:
    """They may have other weights, or round in another way."""
    prefixes = []
    for _ in range(2):
        asked = (engine := make()).ask("a", PROMPT)
        engine.run()
        prefixes.append(asked.rows[0].prefix)
    one, other = prefixes
    assert one is not None and other is not None and len(one.hashes) == len(PROMPT) // BLOCK
    assert not set(one.hashes) & set(other.hashes)


def test_names_of_another_length_do_not_travel_and_nothing_is_left_out(make: Make) -> None:
    engine = make()
    engine.hash_with(lambda of: sha256(of)[:16])
    for turn in range(2):
        asked = engine.ask(f"turn-{turn}", PROMPT)
        engine.run()
        asked.assert_whole()
        assert asked.rows[0].prefix is None
    assert (engine.hits, engine.left_out) == (1, 0)


def test_without_room_for_rows_the_cache_is_read_for_text_alone(make: Make) -> None:
    engine = make(kept_rows_bytes=0)
    for turn in range(2):
        asked = engine.ask(f"sound-{turn}", PROMPT)
        assert engine.run() == len(PROMPT) + 3
        asked.assert_whole()
    engine.ask("text", PROMPT, emit_rows=False)
    assert engine.run() == len(PROMPT) % BLOCK + 3


def test_without_a_prefix_cache_no_rows_are_kept(make: Make) -> None:
    engine = make(enable_prefix_caching=False)
    for turn in range(2):
        asked = engine.ask(f"turn-{turn}", PROMPT, max_tokens=40)
        assert engine.run() == len(PROMPT) + 39
        asked.assert_whole()
    assert engine.scheduler.omni_counts()["kept_rows_bytes"] == 0


def test_the_hit_ends_where_the_rows_do(make: Make) -> None:
    engine = make(kept_rows_bytes=2 * BLOCK_BYTES)
    for turn in range(2):
        asked = engine.ask(f"turn-{turn}", PROMPT)
        assert engine.run() == len(PROMPT) + 3 - turn * 2 * BLOCK
        asked.assert_whole()
    assert engine.scheduler.omni_counts()["kept_rows_bytes"] == 2 * BLOCK_BYTES


def test_what_a_request_for_text_computed_has_no_rows(make: Make) -> None:
    engine = make()
    engine.ask("text", PROMPT, emit_rows=False)
    engine.run()
    asked = engine.ask("sound", PROMPT)
    assert engine.run() == len(PROMPT) + 3
    asked.assert_whole()


def test_of_a_prompt_that_is_still_being_computed_no_more_is_read_than_has_rows(make: Make) -> None:
    engine = make()
    asked = [engine.ask("first", PROMPT)]
    engine.step()
    asked += [engine.ask("second", PROMPT), engine.ask("third", PROMPT)]
    engine.run()
    for each in asked:
        each.assert_whole()


def test_a_cancelled_request_leaves_nothing_but_what_is_kept(make: Make) -> None:
    engine = make()
    engine.ask("left", PROMPT, max_tokens=40)
    engine.step()
    engine.step()
    engine.leave("left")
    engine.step()
    counts = engine.scheduler.omni_counts()
    assert (counts["emitting"], counts["kv_blocks_used"]) == (0, 0)
    assert counts["kept_rows_bytes"] == 3 * BLOCK_BYTES
    asked = engine.ask("next", PROMPT)
    assert engine.run() == len(PROMPT) + 3 - 3 * BLOCK
    asked.assert_whole()


@pytest.mark.parametrize("rows_at", ["prompt", "media"])
def test_rows_of_some_positions_are_sent_whole_and_what_has_none_is_computed_once(make: Make, rows_at: RowsAt) -> None:
    engine = make(rows_at=rows_at)
    first = engine.ask("first", PROMPT, max_tokens=40)
    assert engine.run() == len(PROMPT) + 39
    first.assert_whole()
    again = engine.ask("again", PROMPT)
    assert engine.run() == len(PROMPT) % BLOCK + 3
    again.assert_whole()
    later = engine.ask("later", first.tokens)
    computed = engine.run() - 3
    later.assert_whole()
    # Of the block in which the prompt ended rows of media are not kept, and of a reply none are made.
    assert computed == len(first.tokens) - len(PROMPT) // BLOCK * BLOCK


def test_a_prompt_of_which_all_rows_are_cached_is_computed_at_its_end(make: Make) -> None:
    """Its reader would get none else: they go out with those of a part that is computed."""
    engine, prompt = make(rows_at="prompt"), PROMPT[: 3 * BLOCK]
    first = engine.ask("first", prompt, max_tokens=60)
    engine.run()
    again = engine.ask("again", prompt, max_tokens=60, known=tuple(first.tokens[len(prompt) :][:50]))
    assert engine.run() == BLOCK + 59
    again.assert_whole()
    assert again.tokens == first.tokens


@pytest.mark.parametrize("rows_at", ["all", "prompt", "media"])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kept_blocks", [5, 200])
def test_conversations_at_once_that_preempt_and_leave_each_other(
    make: Make, kept_blocks: int, lag: int, rows_at: RowsAt
) -> None:
    """Turns of four conversations come at any time, some leave, and the cache holds a third of them."""
    engine, chance = make(kept_blocks * BLOCK_BYTES, lag, rows_at=rows_at), random.Random(kept_blocks)
    said = [[chance.randrange(90) for _ in range(chance.randrange(5, 60))] for _ in range(4)]
    done: list[Asked] = []
    for turn in range(TURNS):
        which = turn % 4
        said[which] = [*said[which][:140], *(chance.randrange(90) for _ in range(chance.randrange(1, 12)))]
        asked = engine.ask(f"{turn}", said[which], chance.randrange(1, 40), emit_rows=chance.random() < 0.8)
        said[which] = asked.tokens  # with what the model says meanwhile
        for _ in range(chance.randrange(8)):
            engine.step()
            assert engine.scheduler.omni_counts()["kept_rows_bytes"] <= kept_blocks * BLOCK_BYTES
        done += [engine.open.pop(name) for name in list(engine.open) if engine.open[name].request.is_finished()]
        for name in [name for name in engine.open if chance.random() < 0.03]:
            engine.leave(name)
    engine.run()
    done += engine.open.values()
    assert len(done) > TURNS / 2
    for asked in done:
        assert asked.emits or not asked.rows
        if asked.emits:
            asked.assert_whole()
    counts = engine.scheduler.omni_counts()
    assert min(counts["preemptions"], engine.hits, engine.hits_again) > 0
    assert (counts["emitting"], counts["kv_blocks_used"]) == (0, 0)
