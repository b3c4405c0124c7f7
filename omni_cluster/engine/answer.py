"""The answer to one request, put together from the chunks of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from omni_cluster.types.codes import Codes
from omni_cluster.types.outputs import (
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


class StageProgress:
    """How far one stage is with a request: numbers, and nothing of what it said."""

    def __init__(self) -> None:
        self.tokens = 0
        self.codes = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.makes_calls = False
        self.finish_reason: str | None = None
        self.first_s: float | None = None
        self.last_s = 0.0
        self.handover: HandoverTimes | None = None

    def add(self, chunk: StageChunk, now_s: float) -> None:
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.tokens += len(chunk.token_ids)
        self.codes += 0 if chunk.codes is None else len(chunk.codes)
        self.prompt_tokens = len(chunk.prompt_token_ids or ()) or self.prompt_tokens
        self.cached_tokens += chunk.cached_tokens
        self.makes_calls = self.makes_calls or bool(chunk.calls)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.handover = chunk.handover or self.handover

    @property
    def times(self) -> StageTimes:
        p50_s, max_s = (self.handover.p50_s, self.handover.max_s) if self.handover else (None, None)
        return StageTimes(self.first_s or 0.0, self.last_s, self.tokens + self.codes, self.finish_reason, p50_s, max_s)


class AnswerProgress:
    """What the end of a streamed answer says: why it ended, its times, its tokens. Keeps nothing that was streamed.

    Takes a request's chunks by stage name; `final_types` has the stages in the order of the pipeline. `audio_tokens`:
    tells how many of a prompt's token ids are sound.
    """

    def __init__(
        self, final_types: Mapping[str, str | None], audio_tokens: Callable[[Sequence[int]], int] = lambda _: 0
    ) -> None:
        self._final_types = final_types
        self._started_s = time.perf_counter()
        self._stages = {name: StageProgress() for name in final_types}
        self._audio_tokens = audio_tokens
        self._prompt_audio_tokens = 0

    def add(self, stage: str, chunk: StageChunk) -> None:
        self._stages[stage].add(chunk, time.perf_counter() - self._started_s)
        if chunk.prompt_token_ids and self._final_types[stage] == "text":
            self._prompt_audio_tokens = self._audio_tokens(chunk.prompt_token_ids)

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far."""
        text = self._text
        return TokenCounts(
            prompt=text.prompt_tokens,
            text=text.tokens,
            codec=sum(stage.codes for stage in self._stages.values()),
            cached=text.cached_tokens,
            prompt_audio=self._prompt_audio_tokens,
        )

    @property
    def finish_reason(self) -> str | None:
        """The text's, or "length" where any stage reached its limit: sound may break off after a whole text."""
        reached_a_limit = any(stage.finish_reason == "length" for stage in self._stages.values())
        return "length" if reached_a_limit else self._text.finish_reason

    @property
    def makes_calls(self) -> bool:
        return self._text.makes_calls

    @property
    def times(self) -> dict[str, StageTimes]:
        return {name: stage.times for name, stage in self._stages.items() if stage.first_s is not None}

    @property
    def _text(self) -> StageProgress:
        return next((self._stages[name] for name, kind in self._final_types.items() if kind == "text"), StageProgress())


class StageOutput:
    """All that one stage has said of a request so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.codes: list[Codes] = []
        self.text: list[str] = []
        self.audio: list[AudioChunk] = []
        self.prompt_token_ids: tuple[int, ...] = ()
        self.choices: list[TokenChoice] = []
        self.calls: list[CallDelta] = []
        self.images: list[bytes] = []

    def add(self, chunk: StageChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.text.append(chunk.text)
        self.choices.extend(chunk.choices)
        self.calls.extend(chunk.calls)
        self.images.extend(image.png for image in chunk.images)
        self.prompt_token_ids = chunk.prompt_token_ids or self.prompt_token_ids
        if chunk.codes is not None:
            self.codes.append(chunk.codes)
        if chunk.audio is not None:
            self.audio.append(chunk.audio)


class AnswerBuilder(AnswerProgress):
    """Builds a whole answer: keeps all that its stages say."""

    def __init__(
        self,
        request_id: str,
        final_types: Mapping[str, str | None],
        audio_tokens: Callable[[Sequence[int]], int] = lambda _: 0,
    ) -> None:
        super().__init__(final_types, audio_tokens)
        self._request_id = request_id
        self._outputs = {name: StageOutput() for name in final_types}

    def add(self, stage: str, chunk: StageChunk) -> None:
        super().add(stage, chunk)
        self._outputs[stage].add(chunk)

    def finish(self) -> OmniRequestOutput:
        text, sound = self._of_type("text"), self._of_type("audio")
        return OmniRequestOutput(
            request_id=self._request_id,
            text="".join(text.text),
            token_ids=tuple(text.token_ids),
            prompt_token_ids=text.prompt_token_ids,
            finish_reason=self.finish_reason,
            codes=Codes.joined([codes for each in self._outputs.values() for codes in each.codes]),
            audio=join_audio(sound.audio) if sound.audio else None,
            times=self.times,
            choices=tuple(text.choices),
            cached_tokens=self.counts.cached,
            prompt_audio_tokens=self.counts.prompt_audio,
            calls=join_calls(text.calls),
            images=tuple(self._of_type("image").images),
        )

    def _of_type(self, final_type: str) -> StageOutput:
        named = (self._outputs[name] for name, kind in self._final_types.items() if kind == final_type)
        return next(named, StageOutput())
