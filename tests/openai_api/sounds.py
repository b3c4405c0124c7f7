"""Sound files of the formats and codecs that browsers, phones and messengers record in."""

from __future__ import annotations

import io
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt

RECORDED: Final = {
    "ogg": ("ogg", "libopus", 48_000),
    "ogg of vorbis": ("ogg", "vorbis", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "webm of vorbis": ("webm", "vorbis", 48_000),
    "m4a": ("mp4", "aac", 44_100),
    "m4a of opus": ("mp4", "libopus", 48_000),
    "aac": ("adts", "aac", 24_000),
    "amr": ("amr", "libopencore_amrnb", 8_000),
}
"""FFmpeg's muxer and encoder, and a rate in Hz, by the format and, where it is not the usual one, the codec."""


def recorded(
    name: str, samples: npt.NDArray[np.float32], rate_hz: int, *, video: str | None = None, tracks: int = 1
) -> bytes:
    """Samples `[n]` as a file of one of `RECORDED`, the same in `tracks` tracks; `video`: the encoder of one beside."""
    muxer, encoder, to_hz = RECORDED[name]
    file = io.BytesIO()
    # Ogg would put a second into one page, which one damaged byte takes away; other muxers pass over the option.
    with av.open(file, "w", format=muxer, container_options={"page_duration": "20000"}) as output:
        seen = output.add_stream(video, rate=4, width=16, height=16, pix_fmt="yuv420p") if video else None
        layout = "stereo" if encoder == "vorbis" else "mono"
        options = {"strict": "experimental"}
        heard = [output.add_stream(encoder, rate=to_hz, layout=layout, options=options) for _ in range(tracks)]
        if seen is not None:
            for number in range(4):
                pixels = np.full((16, 16, 3), 50 * number, np.uint8)
                output.mux(seen.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(seen.encode(None))
        for track in heard:
            _mux(output, track, samples, rate_hz)
    return file.getvalue()


def _mux(output: Any, track: Any, samples: npt.NDArray[np.float32], rate_hz: int) -> None:
    context = track.codec_context
    if not context.is_open:
        context.open()
    resampler = av.AudioResampler(context.format, context.layout.name, context.rate, frame_size=context.frame_size)
    # FFmpeg would make one channel quieter where it makes two of it.
    channels = np.repeat(samples[None], context.layout.nb_channels, axis=0)
    frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=context.layout.name)
    frame.sample_rate = rate_hz
    for piece in [*resampler.resample(frame), *resampler.resample(None)]:
        output.mux(track.encode(piece))
    output.mux(track.encode(None))


def wide_band_amr(frames: int, seed: int = 0) -> bytes:
    """An AMR-WB file of so many frames of 20 ms, whose bits are random: every one of them is sound."""
    speech_of_6600_bps, frame_bytes = b"\x04", 17
    bits = np.random.default_rng(seed).integers(0, 256, (frames, frame_bytes), dtype=np.uint8)
    return b"#!AMR-WB\n" + b"".join(speech_of_6600_bps + each.tobytes() for each in bits)
