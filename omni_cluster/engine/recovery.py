"""Requests that survive lost replicas: what their clients have, and how often a replica was lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from omni_cluster.config.schema import StageConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.engine.fan_in import Recovery, StageEvent
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import StageDied
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import AudioChunk, ImageChunk, StageChunk

UNKNOWN = "unknown"
EVENT_S = 5.0
"""Replicas that are lost within so long of each other are lost to one event: a host, or a card that several share."""
MOST_FREE = 10
"""Losses of a request that use up no restart: of replicas that had not taken it, as those of a host that vanished are
listed for a while, and all but the first of one event."""


class AnswerDiffers(StageDied):
    """A request that was begun again does not go on where it was: its answer cannot be finished."""


@dataclass(slots=True)
class DeliveredOutput:
    """What one stage has made of the request; as much as the request's own limits let it make."""

    token_ids: list[int] = field(default_factory=list)
    codes: list[Codes] = field(default_factory=list)
    finish_reason: str | None = None
    num_samples: int = 0
    num_images: int = 0
    has_prompt: bool = False

    def goes_on_with(self, chunk: StageChunk) -> bool:
        """Whether all of the chunk is new, and nothing is missing before it: as it always is in a first run."""
        return (
            (not chunk.token_ids or chunk.token_start == len(self.token_ids))
            and (chunk.codes is None or chunk.codes.start == self.codes_end)
            and (chunk.audio is None or chunk.audio.start == self.num_samples)
            and (not chunk.images or chunk.images[0].number == self.num_images)
            and (chunk.finish_reason is None or self.finish_reason is None)
            and (chunk.prompt_token_ids is None or not self.has_prompt)
        )

    def new_in(self, chunk: StageChunk) -> StageChunk:
        """The chunk without what was delivered."""
        token_ids = self.new_tokens(chunk)
        return structs.replace(
            chunk,
            token_start=chunk.token_end - len(token_ids),
            token_ids=token_ids,
            codes=self.new_codes(chunk.codes),
            text="" if self.finish_reason else chunk.text,
            choices=() if self.finish_reason else chunk.choices,
            calls=() if self.finish_reason else chunk.calls,
            audio=self.new_sound(chunk.audio),
            images=self.new_images(chunk.images),
            finish_reason=None if self.finish_reason else chunk.finish_reason,
            prompt_token_ids=None if self.has_prompt else chunk.prompt_token_ids,
            cached_tokens=0 if self.has_prompt else chunk.cached_tokens,
        )

    def new_tokens(self, chunk: StageChunk) -> tuple[int, ...]:
        """Those that were not delivered. Raises AnswerDiffers if some are missing, or others came in their place."""
        have, given = len(self.token_ids), chunk.token_ids
        if not given:
            return ()
        known = tuple(self.token_ids[chunk.token_start : chunk.token_end])
        if chunk.token_start > have or given[: len(known)] != known:
            raise AnswerDiffers(
                f"tokens {chunk.token_start} to {chunk.token_end} do not follow the {have} that were delivered."
            )
        return given[len(known) :]

    @property
    def codes_end(self) -> int:
        return self.codes[-1].end if self.codes else 0

    def new_codes(self, given: Codes | None) -> Codes | None:
        """As `new_tokens`."""
        if given is None:
            return None
        have, end = Codes.joined(self.codes), self.codes_end
        known = None if have is None else have.between(given.start, given.end)
        if given.start > end or given.between(0, end) != known:
            raise AnswerDiffers(f"codes {given.start} to {given.end} do not follow the {end} that were delivered.")
        return given.after(end)

    def new_sound(self, audio: AudioChunk | None) -> AudioChunk | None:
        """The samples that were not delivered. Raises AnswerDiffers if some are missing."""
        if audio is None or audio.end <= self.num_samples:
            return None
        if audio.start > self.num_samples:
            raise AnswerDiffers(f"sound from sample {audio.start} on does not follow sample {self.num_samples}.")
        return audio.part(self.num_samples - audio.start, len(audio.samples))

    def new_images(self, images: Sequence[ImageChunk]) -> tuple[ImageChunk, ...]:
        """Those that were not delivered. Raises AnswerDiffers if some are missing."""
        new = tuple(image for image in images if image.number >= self.num_images)
        if new and new[0].number > self.num_images:
            raise AnswerDiffers(f"picture {new[0].number} does not follow the {self.num_images} that were delivered.")
        return new

    def add(self, chunk: StageChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.codes += [] if chunk.codes is None else [chunk.codes]
        self.num_samples += 0 if chunk.audio is None else len(chunk.audio.samples)
        self.num_images += len(chunk.images)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.has_prompt = self.has_prompt or chunk.prompt_token_ids is not None

    def known(self) -> KnownOutput:
        codes = Codes.joined(self.codes)
        return KnownOutput(tuple(self.token_ids), self.finish_reason, self.num_samples, self.num_images, codes)


class DeliveredOutputs:
    """What the stages have made of one request, over all of its runs, and the client has."""

    def __init__(self) -> None:
        self._stages: dict[str, DeliveredOutput] = {}

    def new(self, event: StageEvent) -> StageEvent | None:
        """The event without what was delivered; None if nothing is left. Raises AnswerDiffers for one with a gap.

        A stage that goes on says known tokens without their text, so all text is new, unless the stage had finished: a
        given reply comes as a whole.
        """
        output, chunk = self._stages.setdefault(event.stage, DeliveredOutput()), event.chunk
        if output.goes_on_with(chunk):
            output.add(chunk)
            return event
        left = output.new_in(chunk)
        output.add(left)
        return None if left.only_rows else replace(event, chunk=left)

    def known(self) -> dict[str, KnownOutput]:
        """See `OmniRequest.known`."""
        return {name: output.known() for name, output in self._stages.items()}

    def has_all_of(self, stage: str) -> bool:
        """Whether the stage has finished, and all that it made is here."""
        output = self._stages.get(stage)
        return output is not None and output.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Loss:
    """What ended a run: a replica of a stage; `UNKNOWN` and "" where that is not known.

    `was_at_work`: False for a replica that was gone, or silent, before it took the request. `at_s`: when that was
    noticed, on the monotonic clock.
    """

    stage: str
    replica_id: str
    was_at_work: bool = True
    at_s: float = field(default_factory=time.monotonic, compare=False)


class RecoverableRequest:
    """A request over all of its runs: each that loses a replica is followed by one from where it was."""

    def __init__(self, bound: BoundPipeline, request: OmniRequest) -> None:
        self._bound = bound
        self._request = request
        self._delivered = DeliveredOutputs()
        self._losses: list[Loss] = []
        self._survived = 0
        """So many of the losses were survived: the request has said something new since."""
        self._lost_at_s: float | None = None

    @property
    def conversation(self) -> bytes:
        return self._request.conversation

    def stages_left(self) -> list[StageConfig]:
        """Those that the next run needs, sources first: what has not finished, and what feeds it.

        One that has finished, and is not read for its rows, says again what is known: it needs no source.
        """
        ordered, needed = self._bound.stages_for(self._request), set[int]()
        for stage in reversed(ordered):
            has_finished = self._delivered.has_all_of(stage.model_stage)
            if stage.stage_id in needed or not has_finished:
                needed.add(stage.stage_id)
                is_known = has_finished and not self._bound.is_read_for_rows(stage)
                needed.update(() if is_known else stage.engine_input_source)
        return [stage for stage in ordered if stage.stage_id in needed]

    def next_request(self) -> OmniRequest:
        """The request of the next run. What is left of the one before may still be in a replica under its name."""
        if not self._losses:
            return self._request
        request_id = f"{self._request.request_id}-again{len(self._losses)}"
        return replace(self._request, request_id=request_id, known=self._delivered.known())

    def new(self, event: StageEvent) -> StageEvent | None:
        """See `DeliveredOutputs.new`; the first one since replicas at work were lost says what they were."""
        new = self._delivered.new(event)
        if new is None or self._lost_at_s is None:
            return new
        stall_s, self._lost_at_s = time.monotonic() - self._lost_at_s, None
        survived, self._survived = self._losses[self._survived :], len(self._losses)
        stages = tuple(loss.stage for loss in survived if loss.was_at_work)
        return replace(new, recovery=Recovery(stages, stall_s))

    def may_begin_again(self, loss: Loss, lost_at_s: Mapping[str, float]) -> bool:
        """Counts a loss; False when the request was begun again as often as it may.

        `lost_at_s`: replicas that any request has lost, by when that was noticed, on the monotonic clock. Others may be
        noticed late, so each call looks at all losses anew.
        """
        losses = [*self._losses, loss]
        most, counted = self._bound.config.limits.max_restarts, self._counted(losses, lost_at_s)
        if not most or counted > most or len(losses) - counted > MOST_FREE:
            return False
        self._losses = losses
        if loss.was_at_work:  # else nothing is lost: Serve takes replicas away, and some are chosen a moment later
            self._lost_at_s = self._lost_at_s or time.monotonic()
        return True

    def _counted(self, losses: Sequence[Loss], lost_at_s: Mapping[str, float]) -> int:
        """The losses that use up a restart: of replicas at work, and of one event the first.

        Losses are of one event only if other replicas were lost with them: a request that ends replicas ends its own,
        one after another.
        """
        at_work = [loss for loss in losses if loss.was_at_work]
        own = {loss.replica_id for loss in at_work}
        others_s = [at_s for replica_id, at_s in lost_at_s.items() if replica_id not in own]
        counted: list[Loss] = []
        for loss in at_work:
            is_of_event = any(abs(at_s - loss.at_s) <= EVENT_S for at_s in others_s)
            if not (is_of_event and counted and loss.at_s - counted[-1].at_s <= EVENT_S):
                counted.append(loss)
        return len(counted)
