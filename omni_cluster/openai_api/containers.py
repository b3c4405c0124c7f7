"""Media files as FFmpeg opens them: by a demuxer of ours, with decoders of ours, and never another file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import av
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Discard
from av.video.stream import VideoStream

from omni_cluster.openai_api.mov_boxes import check_claims

FAULTS: Final = (av.FFmpegError, OSError, ValueError, ArithmeticError, LookupError)
"""What a damaged file raises while it is read."""

# The first box of an mp4 or mov file; those without ftyp are of QuickTime's own time.
_MOV_BOXES: Final = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
# Pictures in boxes: of a grid of tiles the first would pass for the video.
_PICTURE_BRANDS: Final = (b"heic", b"heix", b"mif1", b"avif")
_EBML: Final = b"\x1a\x45\xdf\xa3"
_MAX_STREAMS: Final = 32


def is_mov(data: bytes) -> bool:
    """Whether the first bytes are those of an mp4, m4a or mov file."""
    return data[4:8] in _MOV_BOXES and data[4:12] not in [b"ftyp" + brand for brand in _PICTURE_BRANDS]


def is_matroska(data: bytes) -> bool:
    """Whether the first bytes are those of a webm or matroska file."""
    return data[:4] == _EBML


def opened(data: bytes, demuxer: str, decoders: Sequence[str], options: Mapping[str, str]) -> InputContainer:
    """The file by FFmpeg's names of what may read it. Raises one of `FAULTS`.

    They are named because detection would reach playlists and every format and codec that is built in.
    """
    if demuxer == "mov":
        check_claims(data)
    bounds = {
        "codec_whitelist": ",".join(decoders),
        "protocol_whitelist": "none",
        "enable_drefs": "0",
        "max_streams": str(_MAX_STREAMS),
    }
    return av.open(
        io.BytesIO(data),
        mode="r",
        format=demuxer,
        options={**bounds, **options},
        metadata_errors="ignore",
        io_open=_refuse_other_files,
    )


def _refuse_other_files(url: str, flags: int, options: dict[str, Any]) -> NoReturn:
    raise PermissionError("a file refers to another one")


def read_only(stream: VideoStream | AudioStream, container: InputContainer) -> None:
    """Has the packets of all other streams passed over."""
    for other in container.streams:
        if other.index != stream.index:
            other.discard = Discard.all


def is_decoded_by(stream: VideoStream | AudioStream, decoders: Sequence[str]) -> bool:
    # A stream whose codec is unknown has no context, though PyAV's types say that it has.
    return bool(stream.codec_context) and stream.codec_context.name in decoders
