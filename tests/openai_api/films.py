"""Video files that tests make, and what is changed in them."""

from __future__ import annotations

import functools
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 64, 48


QUIET = {"libx265": {"x265-params": "log-level=none"}, "libvpx": {"auto-alt-ref": "0"}}


def numbered(number: int, width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.uint8]:
    """A picture of twelve bars, black or white: the number in binary, lowest bit on the left."""
    bits = (number >> np.arange(12)) & 1
    bars = np.repeat(bits, width // 12 + 1)[:width] * 255
    return np.broadcast_to(bars[None, :, None], (height, width, 3)).astype(np.uint8)


@functools.cache
def video_file(
    container: str = "mp4",
    codec: str = "libx264",
    frames: int = 30,
    rate: Fraction | int = 30,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    rotation: int | None = None,
    movflags: str = "",
    sound: str | None = None,
) -> bytes:
    options = {"movflags": movflags} if movflags else {}
    # A file with a name, because the muxer reads it again to move the header.
    with tempfile.NamedTemporaryFile() as file, av.open(file.name, "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=rate, options={"preset": "ultrafast"} if codec == "libx264" else {})
        stream.options = QUIET.get(codec, stream.options)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.thread_count = 1  # VP8's threads wait for each other in loops that take all cores
        if rotation is not None:
            stream.set_display_rotation(rotation)
        track = sound_track(output, sound) if sound else None
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(numbered(number, *size), format="rgb24")
            frame.pts, frame.time_base = number, 1 / Fraction(rate)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if track:
            mux_tone(output, track, frames / Fraction(rate))
        output.close()
        return Path(file.name).read_bytes()


def sound_track(output: Any, codec: str) -> Any:
    return output.add_stream(codec, rate=48_000, layout="stereo", options={"strict": "experimental"})


def mux_tone(output: Any, track: Any, seconds: Fraction, hz: float = 440.0) -> None:
    samples = (0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * 48_000)) / 48_000) * 32767).astype(np.int16)
    context = track.codec_context
    if not context.is_open:
        context.open()
    resampler = av.AudioResampler(context.format, "stereo", 48_000, frame_size=context.frame_size or 1_024)
    frame = av.AudioFrame.from_ndarray(np.repeat(samples, 2)[None], format="s16", layout="stereo")
    frame.sample_rate = 48_000
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        output.mux(track.encode(piece))
    # FLAC ends in a packet without sound, which cannot be written.
    output.mux([packet for packet in track.encode(None) if packet.size])


def box_place(data: bytes, kind: bytes) -> int:
    """Where the body of the first box of this kind begins."""
    place = data.index(kind)
    return place + 4


def patched(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]
