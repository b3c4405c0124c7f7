"""The answer to one request, put together from the chunks of its stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.outputs import (
    AudioChunk,
    CallDelta,
    HandoverTimes,
    OmniRequestOutput,
    StageChunk,
    StageTimes,
    TokenChoice,
    TokenCounts,
    join_audio,
    join_calls,
)


class StageRecord:
    """What one stage has said of a request so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.audio: list[AudioChunk] = []
        self.prompt_token_ids: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.first_s: float | None = None
        self.last_s = 0.0
        self.handover: HandoverTimes | None = None
        self.choices: list[TokenChoice] = []
        self.cached_tokens = 0
        self.calls: list[CallDelta] = []

    def add(self, chunk: StageChunk, now_s: float) -> None:
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.token_ids.extend(chunk.token_ids)
        self.text.append(chunk.text)
        self.choices.extend(chunk.choices)
        self.cached_tokens += chunk.cached_tokens
        self.calls.extend(chunk.calls)
        self.prompt_token_ids = chunk.prompt_token_ids or self.prompt_token_ids
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.handover = chunk.handover or self.handover
        if chunk.audio is not None:
            self.audio.append(chunk.audio)

    @property
    def times(self) -> StageTimes:
        p50_s, max_s = (self.handover.p50_s, self.handover.max_s) if self.handover else (None, None)
        return StageTimes(self.first_s or 0.0, self.last_s, len(self.token_ids), self.finish_reason, p50_s, max_s)


class Answer:
    """Collects a request's chunks by stage name; `stages` names them in the order of the pipeline.

    `audio_tokens`: tells how many of a prompt's token ids are sound.
    """

    def __init__(
        self,
        request_id: str,
        final_types: Mapping[str, str | None],
        audio_tokens: Callable[[Sequence[int]], int] = lambda _: 0,
    ) -> None:
        self._request_id = request_id
        self._final_types = final_types
        self._started_s = time.perf_counter()
        self._records = {name: StageRecord() for name in final_types}
        self._audio_tokens = audio_tokens
        self._prompt_audio_tokens = 0

    def add(self, stage: str, chunk: StageChunk) -> None:
        self._records[stage].add(chunk, time.perf_counter() - self._started_s)
        if chunk.prompt_token_ids and self._final_types[stage] == "text":
            self._prompt_audio_tokens = self._audio_tokens(chunk.prompt_token_ids)

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far."""
        text = self._of_type("text")
        made = sum(len(record.token_ids) for record in self._records.values())
        return TokenCounts(
            prompt=len(text.prompt_token_ids),
            text=len(text.token_ids),
            codec=made - len(text.token_ids),
            cached=text.cached_tokens,
            prompt_audio=self._prompt_audio_tokens,
        )

    async def following(self, events: AsyncGenerator[StageEvent, None]) -> AsyncGenerator[StageChunk, None]:
        """The chunks as they come, each added to the answer; closing this closes `events`."""
        async with contextlib.aclosing(events):
            async for event in events:
                self.add(event.stage, event.chunk)
                yield event.chunk

    def finish(self) -> OmniRequestOutput:
        text = self._of_type("text")
        sound = self._of_type("audio")
        return OmniRequestOutput(
            request_id=self._request_id,
            text="".join(text.text),
            token_ids=tuple(text.token_ids),
            prompt_token_ids=text.prompt_token_ids,
            finish_reason="length" if self._reached_a_limit else text.finish_reason,
            stage_token_ids={name: tuple(r.token_ids) for name, r in self._records.items() if r.token_ids},
            audio=join_audio(sound.audio) if sound.audio else None,
            times={name: r.times for name, r in self._records.items() if r.first_s is not None},
            choices=tuple(text.choices),
            cached_tokens=text.cached_tokens,
            prompt_audio_tokens=self._prompt_audio_tokens,
            calls=join_calls(text.calls),
        )

    @property
    def _reached_a_limit(self) -> bool:
        """In any stage: sound may break off although the text has ended by itself."""
        return any(record.finish_reason == "length" for record in self._records.values())

    def _of_type(self, final_type: str) -> StageRecord:
        for name, kind in self._final_types.items():
            if kind == final_type:
                return self._records[name]
        return StageRecord()
