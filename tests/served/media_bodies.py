"""Bodies with media, up to the largest."""

from __future__ import annotations

import base64
import functools
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import soundfile
from PIL import Image

from tests.http_app import MODEL
from tests.openai_api.films import video_file
from tests.served.app import BASE_URL
from tests.served.leftovers import store_bytes

MAX_FILE_BYTES = 26_214_400


MAX_BODY_BYTES = 67_108_864


QUESTION = {"type": "text", "text": "What is it?"}


CHAT = "/v1/chat/completions"


@functools.cache
def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def picture(width: int, height: int, kind: str, *, plain: bool = False) -> dict[str, Any]:
    image = Image.new("RGB", (width, height), (9, 99, 199)) if plain else Image.fromarray(noise(height, width))
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 60} if kind == "JPEG" else {"compress_level": 1}))
    return as_picture(file.getvalue(), kind)


def as_picture(data: bytes, kind: str) -> dict[str, Any]:
    assert len(data) <= MAX_FILE_BYTES
    url = f"data:image/{kind.lower()};base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def sound(num_samples: int, rate_hz: int = 16_000, channels: int = 1, file_bytes: int = 0) -> dict[str, Any]:
    """A WAV file of noise, filled up to `file_bytes` with a chunk that says nothing."""
    samples = np.random.default_rng(1).integers(-3000, 3000, (num_samples, channels), np.int16).tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate_hz, rate_hz * channels * 2, channels * 2, 16)
    chunks = form + struct.pack("<4sI", b"data", len(samples)) + samples
    if file_bytes:
        rest = file_bytes - 12 - len(chunks) - 8
        chunks += struct.pack("<4sI", b"JUNK", rest) + bytes(rest)
    data = struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks
    assert not file_bytes or len(data) == file_bytes
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def flac(num_samples: int, rate_hz: int, channels: int) -> dict[str, Any]:
    """Noise, which takes two bytes a sample."""
    samples = np.random.default_rng(1).integers(-32_768, 32_767, (num_samples, channels), np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="FLAC")
    size = len(file.getvalue())
    assert 0.98 * MAX_FILE_BYTES < size <= MAX_FILE_BYTES, size
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "flac"},
    }


def mp3(seconds: int, file_bytes: int) -> dict[str, Any]:
    """A tag that fills the file up, as a cover picture does, and noise."""
    file = io.BytesIO()
    samples = np.random.default_rng(1).uniform(-0.1, 0.1, 16_000 * seconds)
    soundfile.write(file, samples, 16_000, format="MP3")
    rest = file_bytes - len(file.getvalue()) - 10
    size = bytes(rest >> shift & 0x7F for shift in (21, 14, 7, 0))
    data = b"ID3\x04\x00\x00" + size + bytes(rest) + file.getvalue()
    assert len(data) == file_bytes
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "mp3"}}


def filled_picture(file_bytes: int) -> dict[str, Any]:
    """A PNG with a chunk of a program's own, which fills it up."""
    file = io.BytesIO()
    Image.fromarray(noise(56, 56)).save(file, "PNG")
    head, rest = file.getvalue()[:33], file.getvalue()[33:]  # its mark and IHDR
    content = bytes(file_bytes - len(file.getvalue()) - 12)
    chunk = struct.pack(">I4s", len(content), b"ruBb") + content
    data = head + chunk + struct.pack(">I", zlib.crc32(chunk[4:])) + rest
    assert len(data) == file_bytes
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def film(**options: Any) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(video_file(**options)).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def filled_film(file_bytes: int) -> dict[str, Any]:
    """Behind its last box another one that says nothing."""
    data = video_file()
    rest = file_bytes - len(data)
    data += struct.pack(">I4s", rest, b"free") + bytes(rest - 8)
    assert len(data) == file_bytes
    return {"type": "video_url", "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(data).decode()}}


def body_of(*parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, QUESTION]}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "ignore_eos": True, **options}


def full_body(body_bytes: int = MAX_BODY_BYTES, **options: Any) -> dict[str, Any]:
    """A sound file and a picture as large as files may be, and text up to the byte that a body may have."""
    parts = [sound(192_000, 192_000, 8, MAX_FILE_BYTES), picture(2600, 2700, "PNG")]
    body = body_of(*parts, **options)
    body["metadata"] = {"filling": ""}
    body["metadata"]["filling"] = "x" * (body_bytes - len(httpx.Request("POST", BASE_URL, json=body).content))
    return body


ANSWERED: dict[str, Callable[[], dict[str, Any]]] = {
    "a screen's JPEG": lambda: body_of(picture(1920, 1080, "JPEG")),
    "a phone's JPEG": lambda: body_of(picture(4000, 3000, "JPEG")),
    "four pictures": lambda: body_of(*[picture(2000, 1500, "JPEG")] * 4),
    "as many pictures as may be": lambda: body_of(*[picture(56, 56, "PNG")] * 16),
    "as many sounds as may be": lambda: body_of(*[sound(1600)] * 64),
    "the largest picture": lambda: body_of(picture(13_377, 13_377, "PNG", plain=True)),
    "the largest file of a picture": lambda: body_of(filled_picture(MAX_FILE_BYTES)),
    "a minute of sound": lambda: body_of(sound(60 * 16_000)),
    "the largest file of sound": lambda: body_of(sound(192_000, 192_000, 8, MAX_FILE_BYTES)),
    "the largest FLAC": lambda: body_of(flac(1_620_000, 192_000, 8)),
    "the largest MP3": lambda: body_of(mp3(10, MAX_FILE_BYTES)),
    "the largest frames": lambda: body_of(film(size=(4096, 2160), frames=2, rate=2)),
    "the longest video": lambda: body_of(film(frames=300, rate=1) | {"fps": 0.04}),
    "the largest file of a video": lambda: body_of(filled_film(MAX_FILE_BYTES)),
    "a body of 64 MiB": full_body,
}


async def store_is_at_most(num_bytes: int) -> bool:
    return store_bytes() <= num_bytes


SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"format": "wav"},
    "stage_sampling_params": {"talker": {"max_tokens": 24}},
}
