"""All kinds of input: how one is made, what takes it, and what it may be refused with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import av
import msgspec

from omni_cluster.types.errors import PayloadError, RequestError
from tests.fuzz import bodies, frames, media, payloads, realtime
from tests.fuzz.driver import Kind

KINDS: Mapping[str, Kind] = {
    "chat": Kind(bodies.chat_body, bodies.take_chat, (RequestError,), 300),
    "speech": Kind(bodies.speech_body, bodies.take_speech, (RequestError,), 150),
    "rows": Kind(payloads.rows, payloads.take_rows, (PayloadError,), 150),
    "extra": Kind(payloads.extra, payloads.take_extra, (PayloadError, msgspec.ValidationError), 200),
    "frame": Kind(
        frames.frame,
        frames.take_frame,
        (ConnectionError, asyncio.IncompleteReadError, PayloadError),
        100,
    ),
    "realtime": Kind(realtime.conversation, realtime.take_conversation, (realtime.SaidAnError,), 60),
    **{
        name: Kind(media.file_of(name), media.take_file(name), (RequestError, av.error.MemoryError), 8)
        for name in media.MEDIA  # the second: FFmpeg makes no table of an absurd size; a decoder answers that with 413
    },
}
