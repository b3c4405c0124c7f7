"""Small files of each kind of media that is accepted, and how a request's are decoded."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import av
import numpy as np
import soundfile
from PIL import Image

from omni_cluster.openai_api.chat import check_chat_request, open_chat_request
from omni_cluster.openai_api.encoding import encode
from tests.fuzz.hostile import MODEL
from tests.fuzz.mutate import changed_bytes
from tests.openai_api.parts import LIMITS
from tests.openai_api.sounds import RECORDED, recorded, wide_band_amr

MEDIA_LIMITS = replace(LIMITS, max_media_bytes=1_000_000, max_body_bytes=4_000_000)
_TONE = 0.3 * np.sin(np.arange(1600, dtype=np.float32) / 9)


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((16, 12)).convert("P" if kind == "GIF" else "RGB").save(file, kind)
    return file.getvalue()


def _deep_png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint16).reshape(12, 16) * 257).save(file, "PNG", transparency=257)
    return file.getvalue()


def _float_wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, _TONE, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def _video(kind: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for number in range(4):
            pixels = np.full((16, 16, 3), 50 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


MEDIA: Mapping[str, Callable[[], bytes]] = {
    **{kind: functools.cache(lambda kind=kind: encode(_TONE, 16_000, kind)) for kind in ("wav", "mp3", "flac")},
    **{name: functools.cache(lambda name=name: recorded(name, _TONE, 16_000)) for name in RECORDED},
    "amr of a wide band": functools.cache(lambda: wide_band_amr(6)),
    "wav of floats": functools.cache(_float_wav),
    **{
        kind.lower(): functools.cache(lambda kind=kind: _picture(kind))
        for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    },
    "png of 16 bits": functools.cache(_deep_png),
    "mp4 of pictures": functools.cache(lambda: _video("mp4", "libx264")),
    "webm of pictures": functools.cache(lambda: _video("webm", "libvpx")),
}
_VIDEOS = ("mp4 of pictures", "webm of pictures")
_SOUNDS = ("wav", "mp3", "flac", "wav of floats", "amr of a wide band", *RECORDED)


def file_of(kind: str) -> Callable[[Random], bytes]:
    return lambda rng: changed_bytes(MEDIA[kind](), rng)


def take_file(kind: str) -> Callable[[bytes], None]:
    """As what a URL of a request led to."""
    place = "video_url" if kind in _VIDEOS else "audio_url" if kind in _SOUNDS else "image_url"
    part = {"type": place, place: {"url": "https://a.example/file"}}
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]})

    def take(data: bytes) -> None:
        checked = check_chat_request(body.encode(), models=[MODEL], voices=[], limits=MEDIA_LIMITS)
        open_chat_request(checked, {checked.urls[0].param: data}, MEDIA_LIMITS)

    return take
