"""Answers about media that must be the reference's."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from omni_cluster.types.inputs import Video
from tests.http_app import HttpApp, chat, events
from tests.reference import Reference, media, prompt_text, videos

QUESTION = {"type": "text", "text": "Hello world, describe it."}


TOKENS = 16


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def as_pictures(video: Video) -> dict[str, Any]:
    """A video as DashScope's clients send it, without loss."""
    frames = []
    for frame in video.frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        frames.append(data_url(file.getvalue(), "image/png"))
    return {"type": "video", "video": frames, "fps": video.fps}


def assert_answered_as_by_the_reference(app: HttpApp, reference: Reference, kind: str, *, stream: bool) -> None:
    wanted = reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=TOKENS, videos=videos(kind))
    text = reference.processor.tokenizer.decode(wanted.token_ids, skip_special_tokens=True)
    content = [*map(as_pictures, videos(kind)), QUESTION]
    answer = chat(app, content, max_tokens=TOKENS, **_streaming(stream))
    assert answer.status_code == 200, answer.text
    said, usage = _text_and_usage(answer, stream)
    assert said == text and usage["prompt_tokens"] == len(wanted.prompt_ids)


def _streaming(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def _text_and_usage(answer: Any, stream: bool) -> tuple[str, dict[str, Any]]:
    if not stream:
        return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
    told = events(answer)
    return "".join(event["choices"][0]["delta"].get("content", "") for event in told[:-1]), told[-1]["usage"]
