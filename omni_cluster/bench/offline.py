"""The same requests to the engines alone, without Ray and HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from omni_cluster.bench.errors import BenchError
from omni_cluster.bench.load import Load
from omni_cluster.bench.record import AudioArrival, RequestRecord, Said, Sound, Stopwatch, stage_seconds
from omni_cluster.config.loader import load_config
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.engine.pipeline import answer_builder
from omni_cluster.models.registry import known_families
from omni_cluster.types.errors import OmniError
from omni_cluster.types.inputs import Media, OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput, StageChunk


class OfflineClient:
    """Asks the engines in this process."""

    def __init__(self, omni: AsyncOmniLLM, load: Load) -> None:
        self._omni = omni
        self.load = load.of(omni.bound.sound.codes_per_s if omni.bound.sound else 0.0)

    @property
    def model(self) -> str:
        return self._omni.config.model

    async def ask(self, number: int, said: Sequence[Said] = ()) -> RequestRecord:
        """See `Client.ask`; the time runs from before the prompt is rendered, as a server's client has it."""
        watch = Stopwatch()
        heard, error = Heard(self.load.stream, watch), None
        answer = answer_builder(str(number), self._omni.bound)
        try:
            async with contextlib.aclosing(self._omni.stream(self._request(number, said))) as events:
                async for event in events:
                    answer.add(event.stage, event.chunk)
                    heard.add(event.chunk)
        except OmniError as broken:
            error = str(broken)
        record = self._record(number, heard, answer.finish(), error)
        return dataclasses.replace(record, earlier_turns=len(said))

    def _request(self, number: int, said: Sequence[Said]) -> OmniRequest:
        spoken = [self.load.speech(each) for each in (*(turn.number for turn in said), number)]
        return OmniRequest(
            request_id=f"bench-{number}",
            prompt=self._omni.render([*self._earlier(said), {"role": "user", "content": self._content(number)}]),
            media=Media(audios=tuple(each.astype(np.float32) / 32768 for each in spoken if each is not None)),
            voice=self.load.voice,
            sampling=self.load.sampling(number, self._omni.bound.family.makers()),
            seed=number,
            streams_audio=self.load.stream,
        )

    def _earlier(self, said: Sequence[Said]) -> Iterator[dict[str, Any]]:
        for turn in said:
            yield {"role": "user", "content": self._content(turn.number)}
            yield {"role": "assistant", "content": turn.reply}

    def _content(self, number: int) -> str | list[dict[str, str]]:
        return self.load.message(number) if self.load.speech(number) is None else [{"type": "audio"}]

    def _record(self, number: int, heard: Heard, output: OmniRequestOutput, error: str | None) -> RequestRecord:
        text_s, audio, audible_at, total_s = heard.finish()
        return RequestRecord(
            number=number,
            total_s=total_s,
            text_s=text_s,
            audio=audio,
            audible_at=audible_at,
            stages=stage_seconds({name: dataclasses.asdict(times) for name, times in output.times.items()}),
            prompt_tokens=len(output.prompt_token_ids),
            text_tokens=len(output.token_ids),
            codec_tokens=output.codec_tokens,
            error=error,
            reply=output.text,
            sample_rate_hz=self._omni.bound.sample_rate_hz,
        )


class Heard:
    """When text and sound came; all at the end for an answer that is not streamed, as a server would send it."""

    def __init__(self, stream: bool, watch: Stopwatch) -> None:
        self._stream = stream
        self._watch = watch
        self._text_s: list[float] = []
        self._sound = Sound()

    def add(self, chunk: StageChunk) -> None:
        if chunk.text:
            self._text_s.append(self._watch())
        if chunk.audio is not None:
            self._sound.add(chunk.audio.samples, self._watch())

    def finish(self) -> tuple[tuple[float, ...], tuple[AudioArrival, ...], int | None, float]:
        """Arrivals of text, those of sound, its first sample that is heard, and the end of the answer."""
        now_s, sound = self._watch(), self._sound
        if self._stream:
            return tuple(self._text_s), tuple(sound.arrivals), sound.audible_at, now_s
        whole = (AudioArrival(now_s, sound.samples),) * bool(sound.samples)
        return (now_s,) * bool(self._text_s), whole, sound.audible_at, now_s


@asynccontextmanager
async def offline_client(config: Path | None, model: str | None, load: Load) -> AsyncIterator[OfflineClient]:
    """Starts all engines, and ends them. Raises ConfigError, and BenchError for stages that the load does not fit."""
    omni = AsyncOmniLLM(_config(config, model))
    here = {part for spec in omni.bound.specs.values() for part in spec.emits}
    if missing := [part for part in ("text", "codes", "sound") if part not in here]:
        raise BenchError(f"--config has no stage that makes {missing[0]}; the load is for text, codes and sound.")
    await omni.start()
    try:
        yield OfflineClient(omni, load)
    finally:
        await omni.shutdown()


def _config(path: Path | None, model: str | None) -> PipelineConfig:
    config = load_config(path, known_families=known_families())
    return config if model is None else config.model_copy(update={"model": model})
