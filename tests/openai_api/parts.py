"""Parts of messages, and bodies of chats, that several modules send."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from omni_cluster.models.qwen2_5_omni.video_frames import FRAMES
from omni_cluster.openai_api.chat import (
    ChatRequest,
    check_chat_request,
    open_chat_request,
)
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.video import VideoLimits

LIMITS = ApiLimits(
    max_body_bytes=200_000,
    max_audio_parts=2,
    max_image_parts=2,
    max_video_parts=1,
    max_media_bytes=50_000,
    max_audio_s=1.0,
    max_image_pixels=400,
    max_decoded_bytes=1_000_000,
    max_output_tokens=256,
    video=VideoLimits(max_s=2.0, max_frames=4, max_frame_pixels=400, frames=FRAMES),
    max_prompt_tokens=28_000,
    max_choices=4,
)
LIMITS_OF_64_MIB = replace(LIMITS, max_body_bytes=67_108_864)


HELLO = [{"role": "user", "content": "hello"}]


def wav_of(values: Any) -> str:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(values, np.int16), 16_000, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


def png_of(color: str, size: tuple[int, int] = (5, 4)) -> str:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def parse(body: Any, limits: ApiLimits = LIMITS) -> ChatRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return open_chat_request(
        check_chat_request(raw, models=["omni"], voices=["Chelsie", "Ethan"], limits=limits), {}, limits
    )


def with_fields(**fields: Any) -> dict[str, Any]:
    return {"model": "omni", "messages": HELLO, **fields}


def audio_part(data: Any, format: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
