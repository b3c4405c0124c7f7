"""What clients ask while processes are killed: chat and speech, text and media, greedy and seeded."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omni_cluster.openai_api.audio import wav_bytes
from tests.reference import synthetic_audio, synthetic_image

TINY = "preset:tiny"
CHAT, SPEECH, REALTIME = "/v1/chat/completions", "/v1/audio/speech", "/v1/realtime"
NOISE = {"seed": 7}
"""Without a seed each answer's sound is made of noise of its own."""
SEEDED = {"temperature": 1.0, "seed": 11}


@dataclass(frozen=True, slots=True)
class Case:
    """A request, or a session. `is_whole`: all of it is read before it is looked at; else it is a stream of events."""

    name: str
    path: str
    body: Mapping[str, Any]
    is_whole: bool = False

    @property
    def has_sound(self) -> bool:
        return self.path == SPEECH or "audio" in self.body["modalities"]

    def of(self, model: str) -> Case:
        """The same, asked of another model."""
        return replace(self, body={**self.body, "model": model})

    def streamed(self) -> dict[str, Any]:
        """The body of a stream of raw sound."""
        if self.path == SPEECH:
            return {**self.body, "stream_format": "sse", "response_format": "pcm"}
        sound = {"audio": {"voice": "Ethan", "format": "pcm16"}} if self.has_sound else {}
        return {**self.body, **sound, "stream": True}

    def whole(self) -> dict[str, Any]:
        """The body of an answer at once, its sound as WAV."""
        if self.path == SPEECH:
            return {**self.body, "response_format": "wav"}
        return {**self.body, **({"audio": {"voice": "Ethan", "format": "wav"}} if self.has_sound else {})}


def chat(
    name: str,
    *parts: Mapping[str, Any] | str,
    text: int = 24,
    codes: int = 120,
    fields: Mapping[str, Any] = NOISE,
    is_whole: bool = False,
) -> Case:
    """An answer of so many text tokens and, unless there are none, codes."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    lengths = {"thinker": text, "talker": codes} if codes else {"thinker": text}
    body = {
        "model": TINY,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"] if codes else ["text"],
        "stage_sampling_params": {stage: {"max_tokens": n, "min_tokens": n} for stage, n in lengths.items()},
    }
    return Case(name, CHAT, body | fields, is_whole)


def next_turn(case: Case, reply: str, message: str) -> Case:
    """The same conversation, with a reply and another message behind it."""
    said = [{"role": "assistant", "content": reply}, {"role": "user", "content": message}]
    return replace(case, name="next turn", body={**case.body, "messages": [*case.body["messages"], *said]})


def cases(model: str) -> list[Case]:
    """All of them; made once, for the media take a while."""
    long_prompt = chat("long prompt", "Count with me. " * 90, text=12, codes=60)
    asked = [
        chat("greedy", "Tell me of the sea."),
        chat("seeded", "Tell me of the land.", fields=SEEDED),
        chat("text", "Tell me of the sky.", text=60, codes=0, fields=SEEDED),
        long_prompt,
        next_turn(long_prompt, "One, two, three.", "Go on."),
        chat("media", _sound(), _picture(), "What are they?", codes=80),
        chat("long answer", "Tell me all.", text=60, codes=400),
        chat("whole", "Tell me of the wind.", codes=100, fields=SEEDED, is_whole=True),
        Case(
            "speech",
            SPEECH,
            {"model": TINY, "input": "The sea is wide, the land is near.", "voice": "Ethan", **NOISE},
        ),
        Case("by voice", REALTIME, {"model": TINY}, is_whole=True),
    ]
    return [case.of(model) for case in asked]


def refused(model: str) -> list[Case]:
    """Bad inputs, each to be answered 400."""
    asked = [
        chat("no such temperature", "Tell me.", fields={"temperature": -1}),
        chat("no such field of a part", {"type": "image_url", "image_url": {}}),
        Case("no such voice", SPEECH, {"model": TINY, "input": "Hello.", "voice": "Nobody"}),
    ]
    return [case.of(model) for case in asked]


def _picture() -> dict[str, Any]:
    file = io.BytesIO()
    synthetic_image().save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(file.getvalue())}"}}


def _sound() -> dict[str, Any]:
    data = _base64(wav_bytes(synthetic_audio(), 16_000))
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
