"""The answers of `POST /v1/audio/transcriptions` and `/v1/audio/translations`, whole and as the events of a stream."""

from __future__ import annotations

import html
import math
import zlib
from collections.abc import Sequence
from typing import Any

from omni_cluster.openai_api.completion import token_logprob
from omni_cluster.openai_api.transcription import TranscriptionRequest
from omni_cluster.types.outputs import OmniRequestOutput, TokenChoice


def transcript(asked: TranscriptionRequest, output: OmniRequestOutput) -> dict[str, Any]:
    """The body of `json` and `verbose_json`."""
    ended = {"finish_reason": ending(output)}
    if asked.format == "verbose_json":
        return _verbose(asked, output) | ended
    told = {"logprobs": logprobs(output.choices)} if asked.tells_logprobs else {}
    return {"text": output.text, **told, "usage": _usage(output), **ended}


def plain_transcript(asked: TranscriptionRequest, text: str) -> str:
    """The body of `text`, `srt` and `vtt`; the last two have one cue, which lasts as long as the sound."""
    if asked.format == "text":
        return f"{text}\n"
    cue = " ".join(text.split())
    if asked.format == "srt":
        return f"1\n{_time(0, ',')} --> {_time(asked.duration_s, ',')}\n{cue}\n\n" if cue else ""
    head = "WEBVTT\n\n"
    return (
        f"{head}{_time(0, '.')} --> {_time(asked.duration_s, '.')}\n{html.escape(cue, quote=False)}\n\n"
        if cue
        else head
    )


def delta_event(text: str, choices: Sequence[TokenChoice], tells_logprobs: bool) -> dict[str, Any]:
    """A piece of the text."""
    event: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
    return event | ({"logprobs": logprobs(choices)} if tells_logprobs else {})


def done_event(asked: TranscriptionRequest, output: OmniRequestOutput) -> dict[str, Any]:
    """The end, with the whole text."""
    return {"type": "transcript.text.done", **transcript(asked, output)}


def ending(output: OmniRequestOutput) -> str:
    """Why the text ends."""
    return output.finish_reason or "stop"


def logprobs(choices: Sequence[TokenChoice]) -> list[dict[str, Any]]:
    return [token_logprob(choice.sampled) for choice in choices]


def _usage(output: OmniRequestOutput) -> dict[str, Any]:
    """By tokens, as OpenAI's."""
    counts = output.counts
    details = {"audio_tokens": counts.prompt_audio, "text_tokens": counts.prompt - counts.prompt_audio}
    return {
        "type": "tokens",
        "input_tokens": counts.prompt,
        "input_token_details": details,
        "output_tokens": counts.text,
        "total_tokens": counts.prompt + counts.text,
    }


def _verbose(asked: TranscriptionRequest, output: OmniRequestOutput) -> dict[str, Any]:
    """One segment: the model tells no times, and only that of the whole sound is known."""
    return {
        "task": "transcribe" if asked.into is None else "translate",
        "language": (asked.into or asked.language or "").lower(),
        "duration": asked.duration_s,
        "text": output.text,
        "segments": [_segment(asked, output)] if output.text else [],
        "usage": {"type": "duration", "seconds": math.ceil(asked.duration_s)},
    }


def _segment(asked: TranscriptionRequest, output: OmniRequestOutput) -> dict[str, Any]:
    """OpenAI's clients want every field; `no_speech_prob` is 0, for the model tells none."""
    data = output.text.encode("utf-8", "replace")
    told = [one["logprob"] for one in logprobs(output.choices)]
    return {
        "id": 0,
        "seek": 0,
        "start": 0.0,
        "end": asked.duration_s,
        "text": output.text,
        "tokens": list(output.token_ids),
        "temperature": asked.sampling["temperature"],
        "avg_logprob": sum(told) / max(1, len(told)),
        "compression_ratio": len(data) / len(zlib.compress(data)),
        "no_speech_prob": 0.0,
    }


def _time(seconds: float, point: str) -> str:
    """`HH:MM:SS,mmm`, with `point` before the thousandths."""
    whole_ms = round(seconds * 1000)
    minutes, ms = divmod(whole_ms, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{point}{ms % 1000:03}"
