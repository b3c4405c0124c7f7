"""The formats of sound that is sent: how its first bytes identify one, and what FFmpeg may read it with."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, Literal

from av.container import InputContainer

from omni_cluster.openai_api.containers import is_matroska, is_mov, opened
from omni_cluster.openai_api.errors import BadRequest

AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "aac", "amr"]


@dataclass(frozen=True)
class Reading:
    """FFmpeg's demuxer and decoders of a format, and `codecs`: what these decode, as clients name it."""

    demuxer: str
    decoders: tuple[str, ...]
    codecs: str
    options: dict[str, str] = field(default_factory=dict)


# Its header says all, which FFmpeg would read 5 MB of samples to learn; and each packet costs, however short it is.
_WAV_OPTIONS: Final = {"probesize": "4096", "max_size": "16384"}
_WAV: Final = Reading(
    "wav",
    ("pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_u8", "pcm_f32le", "pcm_f64le", "pcm_mulaw", "pcm_alaw"),
    "PCM, mu-law or A-law",
    _WAV_OPTIONS,
)
_OGG: Final = Reading("ogg", ("opus", "vorbis"), "opus or vorbis")
# Browsers that record to mp4 put aac or opus there.
_MP4: Final = Reading("mov", ("aac", "opus"), "aac or opus")
READINGS: Final[dict[AudioFormat, Reading]] = {
    "wav": _WAV,
    "mp3": Reading("mp3", ("mp3float", "mp3"), "mp3"),
    "flac": Reading("flac", ("flac",), "flac"),
    "ogg": _OGG,
    "opus": _OGG,
    "webm": Reading("matroska", ("opus", "vorbis"), "opus or vorbis"),
    "m4a": _MP4,
    "mp4": _MP4,
    "aac": Reading("aac", ("aac",), "aac"),
    "amr": Reading("amr", ("amrnb", "amrwb"), "amr"),
}
_TAG_HEAD_BYTES: Final = 10
_WAV_HEAD_BYTES: Final = 12
_CHUNK_HEAD_BYTES: Final = 8
_EXTENSIBLE: Final = 0xFFFE


def audio_format_of(data: bytes, param: str, label: AudioFormat | None = None) -> AudioFormat:
    """The format by the file's first bytes; `label`, what the client calls it, where these are of none.

    Raises BadRequest (415) when they are of none and there is no label.
    """
    found = _by_first_bytes(data) or label
    if found is None:
        raise BadRequest(
            f"{param} is no wav, mp3, flac, ogg, webm, m4a, aac or amr file; send one of these.",
            param=param,
            code="unsupported_audio",
            status=415,
        )
    return found


def _by_first_bytes(data: bytes) -> AudioFormat | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"OggS":
        return "ogg"
    if is_matroska(data):
        return "webm"
    if is_mov(data):
        return "m4a"
    if data[:5] == b"#!AMR":
        return "amr"
    return _behind_tag(data)


def _behind_tag(data: bytes) -> AudioFormat | None:
    """Of what may have an ID3 tag before it; with one, mp3 unless the bytes behind it say something else."""
    has_tag = data[:3] == b"ID3"
    start = _tag_bytes(data) if has_tag else 0
    head = data[start : start + 4]
    if head == b"fLaC":
        return "flac"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:  # ADTS
        return "aac"
    is_mp3 = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2  # MPEG, layer III
    return "mp3" if is_mp3 or has_tag else None


def _tag_bytes(data: bytes) -> int:
    """Of an ID3 tag: its head, and what four bytes of seven bits each say."""
    size = 0
    for seven_bits in data[6:_TAG_HEAD_BYTES]:
        size = size << 7 | seven_bits & 0x7F
    return _TAG_HEAD_BYTES + size


def open_sound(data: bytes, format: AudioFormat) -> InputContainer:
    """The file by its format's demuxer. Raises one of `containers.FAULTS`."""
    reading = READINGS[format]
    if reading is _WAV:
        data = _of_whole_samples(data)
    return opened(data, reading.demuxer, reading.decoders, reading.options)


def _of_whole_samples(data: bytes) -> bytes:
    """A WAV whose header says of all bits that a sample takes that they are used.

    Others say of 32 that 24 are, the upper ones. FFmpeg would read samples that are as short as that, or of another
    kind; the unused bits are zeros.
    """
    place = _format_place(data)
    head = data[place : place + 20]
    if place < 0 or len(head) < 20:
        return data
    tag, taken, used = struct.unpack("<H12xH2xH", head)
    if tag != _EXTENSIBLE or not 0 < used < taken:
        return data
    return b"".join((data[: place + 18], head[14:16], data[place + 20 :]))


def _format_place(data: bytes) -> int:
    """Where a WAV's format begins; -1 where it has none before its samples."""
    place = _WAV_HEAD_BYTES
    while place + _CHUNK_HEAD_BYTES <= len(data):
        kind, size_bytes = struct.unpack_from("<4sI", data, place)
        if kind in (b"fmt ", b"data"):
            return place + _CHUNK_HEAD_BYTES if kind == b"fmt " else -1
        place += _CHUNK_HEAD_BYTES + size_bytes + size_bytes % 2
    return -1
