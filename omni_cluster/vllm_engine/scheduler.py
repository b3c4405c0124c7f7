"""vLLM's scheduler for requests with conditioning rows: held until their next one comes, or read from the prefix cache
as far as theirs are kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from omni_cluster.types.errors import PayloadError
from omni_cluster.types.inputs import RowsPush, StageExtra
from omni_cluster.types.rows import HASH_BYTES, PrefixHashes, Rows, check_lacks_none, check_next, width_of
from omni_cluster.vllm_engine.device import DEVICE
from omni_cluster.vllm_engine.engine_args import OmniModelConfig
from omni_cluster.vllm_engine.held_prefixes import HeldPrefixes, can_be_told, forget_reply, name_blocks
from omni_cluster.vllm_engine.install import add_utility_calls, take_back_signals
from omni_cluster.vllm_engine.kept_rows import LEAST_LEFT_OUT, EmittedRows, KeptRows
from omni_cluster.vllm_engine.rows_at import prompt_mask

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
else:
    _Scheduler = object

NEWCOMER_TOKENS = 3
"""Tokens of a request in one step of the engine, at most, while some request's first ones are waited for: it gets only
as many as rows of it came before the step began."""
MOST_BESIDE_NEWCOMERS = 8
"""Where more requests run, short steps cost more than they give: a step's work on the host grows with its requests."""
NOT_FINITE = "omni: not finite"
"""What vLLM's stop reason says of a request that ended for this."""
WAITS_FOR_GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
NEVER = 1 << 62
"""A step that is not reached: vLLM's loop passes over a running request until `next_decode_eligible_step`."""


@dataclass(slots=True)
class RowCount:
    """Up to which position rows or ids of a request have come, of which width, and whether these are all.

    `start`, `first_tokens`: see `StageExtra`.
    """

    rows: int
    width: int
    complete: bool
    first_tokens: int = 0
    start: int = 0

    def lacks(self, end: int) -> bool:
        """Whether rows of positions before `end` have not come."""
        return not self.complete and end > self.rows


@dataclass(slots=True)
class RequestState:
    """What the scheduler knows of a request beside what vLLM does, from its arrival until it is freed.

    `count`, `named`, `hold` and `key` are of a request that takes rows, `emitted` of one whose rows are kept.
    """

    key: str = ""
    """By which its rows are pushed."""
    count: RowCount | None = None
    unsent: list[Rows] = field(default_factory=list)
    """Rows that came and that the workers do not have."""
    is_at_workers: bool = False
    hold: str = ""
    """The name by which blocks are held for it."""
    named: int | None = None
    """How many of its first blocks have names that others know."""
    emitted: EmittedRows | None = None

    def take_unsent(self) -> list[Rows]:
        taken, self.unsent = self.unsent, []
        return taken


class OmniSchedulerMixin(_Scheduler):
    """A vLLM scheduler that knows how many rows each request has.

    Position p of a request can be computed once its row p is there, or once all its rows have come (positions past
    the last row take the pad row). A request is held, never fed a padding row in place of one that is late. Of a long
    prompt the next chunk is computed once its rows have come, while the stage before still makes the rest.

    Of a request that emits rows, as much is read from the prefix cache as has its rows in `KeptRows`. They go out with
    the rows that are computed first; those that went out with an earlier prompt are left out, and given on request.
    Of a request that takes rows, the blocks that are held for it (`HeldPrefixes`) need none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM constructs the scheduler with the engine core, in the core's process, before the core answers any call.
        add_utility_calls(
            EngineCore, omni_push_rows, omni_counts, omni_find_rows, omni_hold_prefix, omni_release_prefix
        )
        take_back_signals()  # an executor over several hosts has connected to Ray by now
        config = OmniModelConfig.of(self.vllm_config)
        self._max_elements = config.max_payload_elements
        self._has_residual_codes = config.has_residual_codes
        # vLLM keeps this many places in the KV cache behind a step's tokens, for those that its further steps compute.
        self.num_lookahead_tokens += config.max_decode_steps - 1
        self._states: dict[str, RequestState] = {}
        self._states_by_key: dict[str, RequestState] = {}
        """Of requests that take rows, as long as they may get more."""
        keeps_rows = config.kept_rows_bytes and self.kv_cache_manager.enable_caching
        self._kept = KeptRows(config.kept_rows_bytes, self.hash_block_size) if keeps_rows else None
        self._salt = int.from_bytes(os.urandom(HASH_BYTES))
        self._rows_at = config.rows_at
        self._least_left_out = -(-LEAST_LEFT_OUT // self.hash_block_size) if config.leaves_rows_out else 0
        longest = -(-(self.max_model_len + self.num_lookahead_tokens) // self.hash_block_size)
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is vLLM's null block
        self._held = HeldPrefixes(self.kv_cache_manager, self.hash_block_size, num_blocks - longest)
        self._clear_new_blocks()
        self._num_preemptions = 0
        self._num_steps = 0
        self._num_computed = 0

    def _clear_new_blocks(self) -> None:
        """Has workers clear each block before its next request writes to it.

        Attention may multiply what is behind a request's last position by zero, and zero times NaN is NaN. vLLM clears
        only for models of its own choice, and says so to each part as it makes it.
        """
        self.needs_kv_cache_zeroing = True
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = True

    def add_request(self, request: Request) -> None:
        extra = StageExtra.of(request.sampling_params.extra_args if request.sampling_params else None)
        if extra is not None:
            self._states[request.request_id] = self._state_of(request, extra)
        if extra is not None and extra.known:
            resume(request, extra.known)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """A grammar that is compiled is brought to where the known output of a request that is begun again ends."""
        is_compiling = request.status == WAITS_FOR_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):
            return False
        known = list(request.output_token_ids) if is_compiling else []
        if self.structured_output_manager.accept_tokens(request, known):
            return True
        request.status = WAITS_FOR_GRAMMAR
        self.grammar_compile_error_reqs.add(request.request_id)
        return False

    def _state_of(self, request: Request, extra: StageExtra) -> RequestState:
        state = RequestState()
        if extra.rows:
            parts = [Rows.unpack(packed, max_elements=self._max_elements) for packed in extra.rows]
            first, width = parts[0], width_of(parts)
            state.key = extra.key
            state.count = RowCount(parts[-1].end, width, extra.rows_complete, extra.first_tokens, first.start)
            state.hold = extra.hold
            if extra.hold:
                request.skip_reading_prefix_cache = False  # it has no rows for what is held for it
            state.named = self._name_blocks(request, self._hashes_of(first.prefix))
            self._states_by_key[extra.key] = state
        elif self._has_residual_codes:
            # Ids say what a prompt without codes is, and no reply.
            named = request.block_hashes if extra.prompt_codes is None else ()
            state.named = self._name_blocks(request, named)
        if extra.emit_rows:
            state.emitted = self._emitted(request, extra.given_tokens)
        return state

    def _hashes_of(self, prefix: PrefixHashes | None) -> Sequence[bytes]:
        return prefix.hashes if prefix is not None and prefix.block_size == self.hash_block_size else ()

    def _name_blocks(self, request: Request, hashes: Sequence[bytes]) -> int | None:
        return name_blocks(request, hashes, self.hash_block_size) if self.kv_cache_manager.enable_caching else None

    def _emitted(self, request: Request, given_tokens: int) -> EmittedRows | None:
        """None where no rows are kept: all of them are computed."""
        if self._kept is None:
            request.skip_reading_prefix_cache = True
            return None
        prompt_blocks = (request.num_prompt_tokens - given_tokens) // self.hash_block_size
        least_left_out = self._least_left_out if can_be_told(request) else 0
        mask = prompt_mask(self._rows_at, request.num_prompt_tokens, request.mm_features)
        return EmittedRows(self._kept, prompt_blocks, least_left_out, mask)

    def _count_of(self, request: Request) -> RowCount | None:
        """None of a request that takes no rows."""
        state = self._states.get(request.request_id)
        return None if state is None else state.count

    def _emitted_of(self, request_id: str) -> EmittedRows | None:
        """None of a request whose rows are not kept."""
        state = self._states.get(request_id)
        return None if state is None else state.emitted

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        blocks, found, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        hit = self._usable(request, found)
        if hit < found:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, hit)
        return blocks, hit, boundary, diverged

    def _usable(self, request: Request, hit: int) -> int:
        """How much of a hit can be used: what has its rows to emit, and behind what the step's own rows have come."""
        size = self.hash_block_size
        emitted = self._emitted_of(request.request_id)
        if emitted is not None:
            hit = emitted.covered(request.block_hashes[: hit // size]) * size
        count = self._count_of(request)
        if count is None or not count.lacks(min(request.num_tokens, hit + self.max_num_scheduled_tokens)):
            return hit
        return min(hit, max(count.start, (count.rows - self.max_num_scheduled_tokens) // size * size))

    def push_rows(self, pushes: Sequence[RowsPush]) -> list[str | None]:
        """Appends rows to requests that are here; rows of one that has ended meanwhile are dropped.

        Says of each push what was wrong with it, if anything. Such a request gets no further rows, which would be at
        wrong positions: its owner learns of it, and ends it.
        """
        return [self._refusal(push) for push in pushes]

    def _refusal(self, push: RowsPush) -> str | None:
        state = self._states_by_key.get(push.key)
        try:
            if state is not None and state.count is not None:
                self._append(state, state.count, push)
        except PayloadError as error:
            del self._states_by_key[push.key]
            return str(error)
        return None

    def _append(self, state: RequestState, count: RowCount, push: RowsPush) -> None:
        rows = Rows.unpack(push.rows, max_elements=self._max_elements)
        check_lacks_none(rows)
        check_next(rows, count.rows, count.width)
        if len(rows.raw):
            state.unsent.append(Rows(rows.kind, rows.dtype, rows.start, rows.raw))  # bare, for it may be pickled
            count.rows, count.width = rows.end, count.width or width_of([rows])
        count.complete = count.complete or push.complete

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for request in self.running:
            request.next_decode_eligible_step = NEVER if self._is_held(request) else 0
        blocked = self._take_out_blocked()
        output = super().schedule(*args, **kwargs)
        for request in reversed(blocked):
            self.waiting.prepend_request(request)
        self._num_preemptions += len(output.preempted_req_ids or ())
        self._num_steps += bool(output.num_scheduled_tokens)
        self._num_computed += output.total_num_scheduled_tokens
        output.omni_media = self._media_of_resumed(output)  # these four ride the pickled output to every rank
        output.omni_prefixes = self._begin_to_emit(output)
        output.omni_rows = self._rows_for_workers(output)
        output.omni_further = self._further_steps(output)
        return output

    def _media_of_resumed(self, output: SchedulerOutput) -> dict[str, Any]:
        """vLLM sends media once, and none that the prefix cache covers; after a preemption that may be fewer."""
        resumed = [self.requests[request_id] for request_id in output.scheduled_cached_reqs.resumed_req_ids]
        return {request.request_id: request.mm_features for request in resumed if request.mm_features}

    def _rows_for_workers(self, output: SchedulerOutput) -> list[tuple[str, Rows]]:
        """Takes what came for requests that the workers have; that of others waits until they are scheduled."""
        for new in output.scheduled_new_reqs:
            if new.req_id in self._states:
                self._states[new.req_id].is_at_workers = True
        known = [(request_id, state) for request_id, state in self._states.items() if state.is_at_workers]
        return [(request_id, rows) for request_id, state in known for rows in state.take_unsent()]

    def _begin_to_emit(self, output: SchedulerOutput) -> dict[str, PrefixHashes]:
        """Takes the rows of what was read from the cache before anything can drop them. Returns the prompts' names."""
        again = output.scheduled_cached_reqs
        computed = dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        hits = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        hits |= {request_id: computed[request_id] for request_id in again.resumed_req_ids}
        begun = {r: emitted for r in hits if (emitted := self._emitted_of(r)) is not None}
        for request_id, emitted in begun.items():
            blocks = hits[request_id] // self.hash_block_size
            emitted.begin(self.requests[request_id].block_hashes[:blocks])
        named = [each for each in begun if can_be_told(self.requests[each])]
        return {request_id: self._prefix_of(self.requests[request_id]) for request_id in named}

    def _prefix_of(self, request: Request) -> PrefixHashes:
        hashes = request.block_hashes[: request.num_prompt_tokens // self.hash_block_size]
        return PrefixHashes(self.hash_block_size, self._salted(hashes))

    def _salted(self, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """The names by which others know blocks of this engine, and the other way round.

        An engine of other weights gives the same tokens the same hashes, but other rows.
        """
        return tuple((int.from_bytes(each) ^ self._salt).to_bytes(HASH_BYTES) for each in hashes)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        broken = [r for r, nans in (model_runner_output.num_nans_in_logits or {}).items() if nans]
        for request_id in broken:
            _take_out(request_id, model_runner_output)
        packed = model_runner_output.pooler_output
        for i, request_id in enumerate(model_runner_output.req_ids if packed else ()):
            emitted = self._emitted_of(request_id)
            if packed[i] is not None and emitted is not None:
                packed[i] = emitted.pass_on(self.requests[request_id].block_hashes, packed[i])
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in broken:
            if request_id in self.requests:
                self._end_broken(self.requests[request_id], outputs)
        return outputs

    def _end_broken(self, request: Request, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Ends a request whose values are not finite; the prefix cache forgets all of its blocks."""
        groups = self.kv_cache_manager.get_block_ids(request.request_id)
        self._held.evict({block_id for ids in groups for block_id in ids})
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        end = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=NOT_FINITE)
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(end)

    def _further_steps(self, output: SchedulerOutput) -> dict[str, int]:
        """How many tokens beyond the first each request may get in the step, for those that may get any."""
        if not self.num_lookahead_tokens:
            return {}
        requests = [self.requests[r] for r in output.num_scheduled_tokens]
        most = self.num_lookahead_tokens
        if self._is_waited_for():
            most = min(most, NEWCOMER_TOKENS - 1)
        rooms = {request.request_id: self._room(request, most) for request in requests}
        return {r: room for r, room in rooms.items() if room > 0}

    def _is_waited_for(self) -> bool:
        """Whether somebody's first tokens are still to come, beside few other requests."""
        return 1 < len(self.running) <= MOST_BESIDE_NEWCOMERS and any(map(self._begins, self.running))

    def _begins(self, request: Request) -> bool:
        count = self._count_of(request)
        return count is not None and request.num_output_tokens < count.first_tokens

    def _room(self, request: Request, most: int) -> int:
        """How many tokens may follow the step's first one on the device: their rows are known, limits allow them."""
        count = self._count_of(request)
        if count is None or request.num_computed_tokens < request.num_tokens:
            return 0
        room = min(
            most,
            request.max_tokens - request.num_output_tokens - 1,
            self.max_model_len - request.num_tokens - 1,
        )
        least = request.sampling_params.min_tokens if request.sampling_params else 0
        if request.num_output_tokens < least:
            room = min(room, least - request.num_output_tokens - 1)  # then the tokens that end a request are let in
        return room if count.complete else min(room, count.rows - request.num_tokens)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        request.num_computed_tokens += len(new_token_ids) - 1  # vLLM counted the one that it scheduled
        return super()._update_request_with_output(request, new_token_ids, *args, **kwargs)

    def _is_held(self, request: Request) -> bool:
        """Whether rows of the request's next step, a token or the largest chunk of its prompt, have not come."""
        count = self._count_of(request)
        if count is None:
            return False
        computed = max(request.num_computed_tokens, count.start)
        return count.lacks(max(computed + 1, min(request.num_tokens, computed + self.max_num_scheduled_tokens)))

    def _take_out_blocked(self) -> list[Request]:
        # vLLM's waiting loop, unlike its running loop, has no check of eligibility.
        blocked = [r for r in self.waiting if self._is_held(r)]
        if blocked:
            self.waiting.remove_requests(blocked)
        return blocked

    def get_num_unfinished_requests(self) -> int:
        """Requests that could run now: with all of them held, the engine sleeps until rows come."""
        total = super().get_num_unfinished_requests()
        has_rows = any(state.is_at_workers and state.unsent for state in self._states.values())
        return total if has_rows else total - self.num_held()

    def num_held(self) -> int:
        """Requests that wait for a row, none of their steps in flight."""
        if not self._states:
            return 0
        running = sum(self._is_held(r) and r.num_output_placeholders == 0 for r in self.running)
        return running + self.num_blocked()

    def num_blocked(self) -> int:
        """Requests that wait for a row before they are admitted."""
        return sum(self._is_held(r) for r in self.waiting)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._let_go(request, state)
        return super()._free_request(request, *args, **kwargs)

    def _let_go(self, request: Request, state: RequestState) -> None:
        self._states_by_key.pop(state.key, None)
        self._held.release(state.hold)
        if state.named is not None:
            forget_reply(self.kv_cache_manager, request.request_id, state.named)
        if state.emitted is not None:
            state.emitted.end(request.block_hashes)

    def omni_counts(self) -> dict[str, int]:
        """What a test or a metric asks: requests, held ones, preemptions and steps so far, KV blocks in use.

        `computed`: positions so far, of prompts and replies; those that the prefix cache answered are none.
        `held` counts `blocked` ones too, which have not been admitted. `compiling`: those without their grammar.
        """
        pool = self.kv_cache_manager.block_pool
        running, waiting = self.get_request_counts()
        return {
            "running": running,
            "waiting": waiting,
            "compiling": sum(r.status == WAITS_FOR_GRAMMAR for r in self.requests.values()),
            "held": self.num_held(),
            "blocked": self.num_blocked(),
            "preemptions": self._num_preemptions,
            "steps": self._num_steps,
            "kv_blocks_used": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1,  # one block is vLLM's null block
            "kv_blocks": pool.num_gpu_blocks - 1,
            "row_counts": sum(state.count is not None for state in self._states.values()),
            "computed": self._num_computed,
            "emitting": sum(state.emitted is not None for state in self._states.values()),
            "kept_rows_bytes": self._kept.num_bytes if self._kept else 0,
            "held_blocks": self._held.num_blocks,
        }

    def find_rows(self, hashes: Sequence[bytes]) -> bytes | None:
        """The rows of blocks that a request under way left out, as bytes; None if they are kept no more."""
        rows = self._kept.find(self._salted(hashes)) if self._kept is not None else None
        return None if rows is None else rows.tobytes()

    def hold_prefix(self, name: str, prefix: PrefixHashes) -> int:
        """See `HeldPrefixes.hold`."""
        return self._held.hold(name, prefix)

    def release_prefix(self, name: str) -> None:
        """Of a request that did not come."""
        self._held.release(name)


class OmniScheduler(OmniSchedulerMixin, StockScheduler):
    """For engines that wait for a step's tokens before they schedule the next one."""


class OmniAsyncScheduler(OmniSchedulerMixin, AsyncScheduler):
    """For engines that schedule a step while the one before it still runs."""


def _take_out(request_id: str, output: ModelRunnerOutput) -> None:
    """Takes a request's tokens and rows out of a step's output: nothing of them is kept or handed on."""
    index = output.req_id_to_index[request_id]
    if output.sampled_token_ids:
        output.sampled_token_ids[index] = []
    if output.pooler_output:
        output.pooler_output[index] = None


def resume(request: Request, known: Sequence[int]) -> None:
    """A request that is begun again is one that was preempted in another engine: its output so far is prefilled."""
    request.append_output_token_ids(list(known))
    request.num_preemptions = 1  # else vLLM asserts that the prefix cache answers no more than a prompt


def omni_push_rows(core: EngineCore, pushes: Any) -> list[str | None]:
    return core.scheduler.push_rows(msgspec.convert(pushes, list[RowsPush]))  # type: ignore[attr-defined, no-any-return]


def omni_find_rows(core: EngineCore, hashes: Any) -> bytes | None:
    return core.scheduler.find_rows(msgspec.convert(hashes, list[bytes]))  # type: ignore[attr-defined, no-any-return]


def omni_hold_prefix(core: EngineCore, name: str, prefix: Any) -> int:
    asked = msgspec.convert(prefix, PrefixHashes, builtin_types=(bytes,))
    return core.scheduler.hold_prefix(name, asked)  # type: ignore[attr-defined, no-any-return]


def omni_release_prefix(core: EngineCore, name: str) -> None:
    core.scheduler.release_prefix(name)  # type: ignore[attr-defined]


def omni_counts(core: EngineCore) -> dict[str, int]:
    """Called every second by the engine's watch."""
    DEVICE.end_without()
    return core.scheduler.omni_counts()  # type: ignore[attr-defined, no-any-return]
