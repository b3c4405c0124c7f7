"""Sound as files and as streams: WAV, raw PCM, FLAC, MP3, Opus and AAC.

Every format encodes the values of `audio.pcm16`: clipped, NaN as silence, 16 bit.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from fractions import Fraction
from types import TracebackType
from typing import Final, Literal, NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.packet import Packet

from omni_cluster.openai_api.audio import S16_STEP, pcm16, wav_bytes

SoundFormat = Literal["wav", "pcm16", "pcm", "flac", "mp3", "opus", "aac"]

MEDIA_TYPES: Final[Mapping[SoundFormat, str]] = {
    "wav": "audio/wav",
    "pcm16": "audio/pcm",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}

_QUICK_SAMPLES: Final = 131_072
_UNKNOWN_BYTES: Final = 0xFFFFFFFF


class _Codec(NamedTuple):
    encoder: str
    muxer: str
    sample_format: str
    bit_rate_bps: int
    muxer_options: Mapping[str, str]


# FLAC's muxer would write 8 KiB of zeros before any sound.
_CODECS: Final[Mapping[SoundFormat, _Codec]] = {
    "flac": _Codec("flac", "flac", "s16", 0, {"metadata_header_padding": "0"}),
    "mp3": _Codec("libmp3lame", "mp3", "s16p", 128_000, {"id3v2_version": "0"}),
    "opus": _Codec("libopus", "ogg", "s16", 64_000, {}),
    "aac": _Codec("aac", "adts", "fltp", 128_000, {}),
}
# Ogg writes whole pages, of 1 s if nothing is said. A page of 20 ms is one packet, for 28 bytes more each. Muxers
# without pages pass over the option.
_STREAM_OPTIONS: Final = {"page_duration": "20000"}


def is_quick(format: SoundFormat | None, samples: int) -> bool:
    """Whether so many samples are encoded within a millisecond, as those of a streamed piece: without a codec."""
    return format not in _CODECS and samples <= _QUICK_SAMPLES


def encode(samples: npt.NDArray[np.float32], sample_rate_hz: int, format: SoundFormat) -> bytes:
    """A whole mono file of samples `[n]`, float32 in [-1, 1].

    wav, pcm16, pcm, flac: lossless; n samples, the values of `pcm16`. A FLAC file states its length and checksum.
    opus: 64 kbit/s, Ogg. Decodes at 48 kHz to exactly n * 48000 / sample_rate_hz samples, aligned with the input.
    mp3: 128 kbit/s. Decodes to exactly n samples, aligned, where the decoder reads the LAME tag; one that does not
    plays the silence that `SoundEncoder` describes. FFmpeg leaves up to 529 samples of silence after sound of fewer
    than 47 samples. LAME turns the sound down by 5 %.
    aac: 128 kbit/s, ADTS, which has no place for a length: decoders give the sound after 1024 samples of silence, and
    up to 1023 of it at the end. A stream is the same bytes.

    No samples: wav and flac are files of length 0, pcm and aac are no bytes; opus has its two headers and mp3 its tag,
    which some decoders, FFmpeg's among them, refuse because no packet follows.

    Raises ValueError for a rate that the format does not have: opus has 8, 12, 16, 24 and 48 kHz, mp3 these and
    11.025, 22.05, 32 and 44.1 kHz, aac these and 7.35, 64, 88.2 and 96 kHz.
    """
    if format in _CODECS:
        return _codec_file(pcm16(samples), sample_rate_hz, _CODECS[format])
    return wav_bytes(samples, sample_rate_hz) if format == "wav" else pcm16(samples)


def _codec_file(pcm: bytes, sample_rate_hz: int, codec: _Codec) -> bytes:
    file = io.BytesIO()
    writer = _CodecWriter(file, sample_rate_hz, codec, {})
    try:
        writer.push(pcm)
        writer.finish()
    finally:
        writer.close()
    return file.getvalue()


class SoundEncoder:
    """The same in pieces, for streams: the joined bytes are a stream that players read from its start on.

    wav has the size 0xFFFFFFFF in its header, read as "until the end"; flac states no length or checksum. Opus is
    aligned and as long as the input exactly. mp3 has no LAME tag, so that decoders give the sound after 1105 samples of
    silence and up to 575 samples of it at the end (both at 24 kHz).

    What can be decoded from the bytes so far lags behind the samples pushed: wav and pcm by nothing, opus by up to
    47 ms, mp3 by up to 72 ms, flac by up to 96 ms, aac by up to 128 ms (at 24 kHz).

    A context manager: leaving it closes the encoder, finished or not. Use it from one thread at a time.

    Raises ValueError for a rate that the format does not have, as `encode` does.
    """

    def __init__(self, sample_rate_hz: int, format: SoundFormat) -> None:
        self._sink = _Sink()
        self._is_open = True
        self._writer: _CodecWriter | None = None
        if format in _CODECS:
            self._writer = _CodecWriter(self._sink, sample_rate_hz, _CODECS[format], _STREAM_OPTIONS)
        elif format == "wav":
            self._sink.write(_endless_wav_header(sample_rate_hz))

    def push(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Bytes that may be sent now, with the header in the first; empty while too few of samples `[n]` came.

        Raises ValueError when the encoder is finished or closed.
        """
        self._check_open()
        if self._writer is None:
            self._sink.write(pcm16(samples))
        else:
            self._writer.push(pcm16(samples))
        return self._sink.take()

    def finish(self) -> bytes:
        """The last bytes; closes the encoder. Raises ValueError when it is finished or closed already."""
        self._check_open()
        if self._writer is not None:
            self._writer.finish()
        self.close()
        return self._sink.take()

    def close(self) -> None:
        """Releases the encoder and leaves the stream as it is; may be called again."""
        self._is_open = False
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> SoundEncoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the encoder is closed")


class _Sink:
    """Takes what a muxer writes. It has no seek, so that muxers do not come back to their headers."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


def _endless_wav_header(sample_rate_hz: int) -> bytes:
    pcm, channels, sample_bytes = 1, 1, 2
    rates = struct.pack("<II", sample_rate_hz, sample_rate_hz * channels * sample_bytes)
    layout = struct.pack("<HH", pcm, channels) + rates + struct.pack("<HH", channels * sample_bytes, 8 * sample_bytes)
    unknown = struct.pack("<I", _UNKNOWN_BYTES)
    return b"RIFF" + unknown + b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"data" + unknown


class _CodecWriter:
    """An encoder and a muxer that write to `file`, the header at once."""

    def __init__(
        self, file: io.BytesIO | _Sink, sample_rate_hz: int, codec: _Codec, options: Mapping[str, str]
    ) -> None:
        self._sample_rate_hz = sample_rate_hz
        self._sample_format = codec.sample_format
        self._pushed_samples = 0
        _check_rate(sample_rate_hz, codec)
        self._container = av.open(file, "w", format=codec.muxer, container_options={**codec.muxer_options, **options})
        self._stream = self._container.add_stream(
            codec.encoder,
            rate=sample_rate_hz,
            bit_rate=codec.bit_rate_bps,
            format=codec.sample_format,
            layout="mono",
        )
        self._container.start_encoding()

    def push(self, pcm: bytes) -> None:
        if pcm:
            frame = self._frame(np.frombuffer(pcm, "<i2"))
            self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        self._container.mux([packet for packet in self._stream.encode(None) if not _only_padding(packet)])
        self._container.close()

    def close(self) -> None:
        self._container.close()

    def _frame(self, values: npt.NDArray[np.int16]) -> AudioFrame:
        samples = values * S16_STEP if self._sample_format == "fltp" else values
        frame = AudioFrame.from_ndarray(samples[None], format=self._sample_format, layout="mono")
        frame.sample_rate = self._sample_rate_hz
        frame.time_base = Fraction(1, self._sample_rate_hz)
        frame.pts = self._pushed_samples
        self._pushed_samples += values.size
        return frame


def _check_rate(sample_rate_hz: int, codec: _Codec) -> None:
    rates_hz = av.Codec(codec.encoder, "w").audio_rates
    if rates_hz and sample_rate_hz not in rates_hz:
        raise ValueError(f"{codec.encoder} has no rate of {sample_rate_hz} Hz, but {sorted(rates_hz)}")


def _only_padding(packet: Packet[AudioStream]) -> bool:
    # LAME may end with a frame past the sound. The muxer takes the padding that the tag states from the last frame
    # alone, so with that frame the stated length would be up to 46 samples too long. FLAC ends with a packet of no
    # bytes, which carries the checksum.
    return bool(packet.size and not packet.duration)
