from __future__ import annotations

import functools
import io
import math
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from omni_cluster.models.qwen2_5_omni.video_frames import FRAMES
from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.kept_frames import spread_indices
from omni_cluster.openai_api.media import Picture, read_picture
from omni_cluster.openai_api.video import VideoLimits, decode_video, video_of_frames
from omni_cluster.types.inputs import Video
from tests.openai_api.films import HEIGHT, QUIET, WIDTH, box_place, mux_tone, numbered, patched, sound_track, video_file

PARAM = "messages[0].content[0].video_url.url"
LEAKS = ("object at", "0x", "BytesIO", "av.", "PIL", "Errno", "avcodec", "Traceback", "<none>", "/tmp", "<_io")
LIMITS = VideoLimits(max_s=60.0, max_frames=768, max_frame_pixels=1_000_000, frames=FRAMES)
CONTAINERS = [
    ("mp4", "libx264"),
    ("mp4", "libx265"),
    ("mp4", "libsvtav1"),
    ("mov", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("webm", "libsvtav1"),
    ("matroska", "libx264"),
]


def number_of(frame: npt.NDArray[np.uint8]) -> int:
    width = frame.shape[1] // 12 + 1
    bars = [frame[:, place : place + width].mean() > 127 for place in range(0, frame.shape[1], width)]
    return sum(1 << place for place, bar in enumerate(bars) if bar)


def numbers_of(video: Video) -> list[int]:
    return [number_of(frame) for frame in video.frames]


@functools.cache
def ramp_film(container: str, codec: str, layout: str) -> bytes:
    """Four frames, each black on the left and white on the right."""
    file = io.BytesIO()
    ramp = np.repeat(np.tile(np.linspace(0, 255, 256, dtype=np.uint8), (128, 1))[..., None], 3, axis=2)
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=4, options=QUIET.get(codec, {}))
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = 256, 128, layout
        for _ in range(4):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(ramp, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def pcm_mov(samples: npt.NDArray[Any], rate: int, layout: str) -> bytes:
    """A mov file of 30 frames with these samples `[n, channels]`, int16 or float32, as its sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as output:
        stream = output.add_stream("libx264", rate=30)
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        codec, kind = ("pcm_s16le", "s16") if samples.dtype == np.int16 else ("pcm_f32le", "flt")
        track = output.add_stream(codec, rate=rate, layout=layout)
        for number in range(30):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(number), format="rgb24")))
        output.mux(stream.encode(None))
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format=kind, layout=layout)
        frame.sample_rate = rate
        output.mux(track.encode(frame))
    return file.getvalue()


def sound_only(container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        mux_tone(output, sound_track(output, codec), Fraction(1))
    return file.getvalue()


def decoded(
    data: bytes,
    limits: VideoLimits = LIMITS,
    fps: float = 2.0,
    num_frames: int | None = None,
    with_audio: bool = False,
    max_audio_s: float = 60.0,
) -> Video:
    return decode_video(
        data,
        limits=limits,
        fps=fps,
        num_frames=num_frames,
        with_audio=with_audio,
        max_audio_s=max_audio_s,
        budget=Budget(1 << 30),
        param=PARAM,
    )


def limited(max_s: float = 60.0, max_frames: int = 768, max_frame_pixels: int = 1_000_000) -> VideoLimits:
    return VideoLimits(max_s, max_frames, max_frame_pixels, FRAMES)


def refused(words: str, status: int, act: Callable[[], Any]) -> BadRequest:
    with pytest.raises(BadRequest, match=words) as caught:
        act()
    error = caught.value
    assert (error.status, error.param) == (status, PARAM)
    assert error.code and error.message.startswith(PARAM) and error.message.endswith(".")
    assert not any(leak in error.message for leak in LEAKS), error.message
    assert error.__cause__ is None
    return error


def reference_count(total: int, file_fps: float, fps: float, max_frames: int = 768) -> int:
    """Frames that Qwen's package takes of a file, written down from its rules: 4 to the most, even, floored."""
    most = min(max_frames, total) // 2 * 2
    return int(min(max(total / file_fps * fps, 4), most, total)) // 2 * 2


def evenly_spread(numbers: Sequence[int], total: int, count: int) -> bool:
    """Whether each is the whole number next to its place on the line from 0 to the last; either one for a half."""
    places = [Fraction(total - 1) * place / (count - 1) for place in range(count)]
    near = Fraction(1, 2) + Fraction(total, 2**20)
    return len(numbers) == count and all(abs(n - p) <= near for n, p in zip(numbers, places, strict=True))


class TestContainers:
    @pytest.mark.parametrize(("container", "codec"), CONTAINERS)
    def test_each_is_read(self, container: str, codec: str) -> None:
        video = decoded(video_file(container, codec, frames=90))
        assert numbers_of(video) == [0, 18, 36, 53, 71, 89]
        assert (video.frames.dtype, video.frames.shape) == (np.uint8, (6, HEIGHT, WIDTH, 3))
        assert video.fps == pytest.approx(2.0) and video.audio is None

    @pytest.mark.parametrize("movflags", ["faststart", "frag_keyframe+empty_moov", "empty_moov+default_base_moof"])
    def test_every_order_of_mp4_boxes_is_read(self, movflags: str) -> None:
        assert numbers_of(decoded(video_file(movflags=movflags, frames=90))) == [0, 18, 36, 53, 71, 89]

    def test_colours_are_rgb(self) -> None:
        red = video_of_one_colour((230, 20, 30))
        assert np.abs(decoded(red).frames.astype(int) - [230, 20, 30]).max() < 8

    @pytest.mark.parametrize("container", ["avi", "mpegts", "ogg", "flv", "gif"])
    def test_other_containers_are_refused(self, container: str) -> None:
        codec = {"ogg": "libvpx", "gif": "gif", "flv": "flv"}.get(container, "mpeg4")
        if codec == "gif":
            file = io.BytesIO()
            Image.new("RGB", (8, 8)).save(file, "GIF")
            data = file.getvalue()
        else:
            data = video_file(container, codec)
        refused("no mp4, mov, webm or matroska", 415, lambda: decoded(data))

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x1a\x45\xdf",
            b"RIFF",
            b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://example.com/a.ts\n#EXT-X-ENDLIST\n",
            b"ffconcat version 1.0\nfile /etc/passwd\n",
            b"\0\0\0\x1cftypheic\0\0\0\0mif1heic" + b"\0" * 100,
        ],
    )
    def test_what_is_no_video_is_refused(self, data: bytes) -> None:
        refused("no mp4, mov, webm or matroska", 415, lambda: decoded(data))

    @pytest.mark.parametrize("head", [b"\x1a\x45\xdf\xa3", b"\0\0\0\x10ftypisom\0\0\0\0"])
    def test_a_playlist_behind_a_video_s_first_bytes_is_not_followed(self, head: bytes, tmp_path: Path) -> None:
        (tmp_path / "secret.mp4").write_bytes(video_file())
        playlist = f"\n#EXTM3U\n#EXTINF:9,\n{tmp_path}/secret.mp4\n#EXT-X-ENDLIST\n".encode()
        refused("cannot be read as a video", 400, lambda: decoded(head + playlist))

    @pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mjpeg"), ("matroska", "ffv1")])
    def test_a_codec_that_is_not_listed_is_refused(self, container: str, codec: str) -> None:
        if codec == "mjpeg":
            data = video_of_one_colour((1, 2, 3), container, codec, "yuvj420p")
        else:
            data = video_file(container, codec)
        refused("video of a codec that is not accepted; send h264", 415, lambda: decoded(data))

    @pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "vorbis")])
    def test_a_file_of_sound_alone_is_refused(self, container: str, codec: str) -> None:
        data = sound_only(container, codec)
        for with_audio in (False, True):
            refused("has no video in it", 400, functools.partial(decoded, data, with_audio=with_audio))

    def test_data_that_lie_in_another_file_are_not_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "other.mp4").write_bytes(video_file())
        data = with_external_data(video_file(), str(tmp_path / "other.mp4"))
        refused("cannot be read as a video", 400, lambda: decoded(data))

    @pytest.mark.parametrize("rotation", [0, 90, -90, 180])
    def test_the_display_matrix_turns_the_frames(self, rotation: int) -> None:
        upright = decoded(video_file(frames=30)).frames
        turned = decoded(video_file(frames=30, rotation=rotation)).frames
        expected = {0: upright, 90: turn_left(upright), -90: turn_right(upright), 180: upright[:, ::-1, ::-1]}
        assert np.array_equal(turned, expected[rotation])

    def test_frames_that_change_their_size_are_refused(self) -> None:
        data = vp8_file([*vp8_packets(10), *vp8_packets(10, (32, 16))])
        refused("frames of 64 x 48 and of 32 x 16 pixels; send frames of one size", 400, lambda: decoded(data))


def video_of_one_colour(
    colour: tuple[int, int, int], container: str = "mp4", codec: str = "libx264", pix_fmt: str = "yuv420p"
) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pix_fmt
        picture = np.full((HEIGHT, WIDTH, 3), colour, np.uint8)
        for _ in range(4):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def turn_left(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return frames.transpose(0, 2, 1, 3)[:, ::-1]


def turn_right(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return frames.transpose(0, 2, 1, 3)[:, :, ::-1]


def vp8_packets(frames: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> list[bytes]:
    encoder = av.CodecContext.create("libvpx", "w")
    encoder.width, encoder.height, encoder.pix_fmt = *size, "yuv420p"
    encoder.time_base, encoder.options = Fraction(1, 30), {"auto-alt-ref": "0", "lag-in-frames": "0"}
    packets = []
    for number in range(frames):
        frame = av.VideoFrame.from_ndarray(numbered(number, *size), format="rgb24")
        frame.pts = number
        packets += [bytes(packet) for packet in encoder.encode(frame)]
    return packets + [bytes(packet) for packet in encoder.encode(None)]


def vp8_file(packets: Sequence[bytes]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream = output.add_stream("libvpx", rate=30)
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number, data in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 30)
            packet.pts = packet.dts = number
            output.mux(packet)
    return file.getvalue()


def with_external_data(data: bytes, path: str) -> bytes:
    """The mp4 file, its header behind its media, with a Macintosh alias in place of 'the data are in this file'."""
    name = path.encode() + b"\0" * (len(path) % 2)
    alias = b"\0" * 10 + bytes([0]) + b"\0" * 27 + b"\0" * 12 + bytes([0]) + b"\0" * 63 + b"\0" * 16
    alias += struct.pack(">HH", 1, 1) + b"\0" * 16 + struct.pack(">HH", 2, len(path)) + name
    alias += struct.pack(">hh", -1, 0)
    entry = struct.pack(">I4sI", 12 + len(alias), b"alis", 0) + alias
    place = data.index(b"url ") - 4
    data = data[:place] + entry + data[place + 12 :]
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = data.index(kind) - 4
        (size,) = struct.unpack_from(">I", data, start)
        data = patched(data, start, struct.pack(">I", size + len(entry) - 12))
    return data


class TestSampling:
    @pytest.mark.parametrize("rate", [Fraction(30), Fraction(30_000, 1001), Fraction(25), Fraction(15, 2)])
    @pytest.mark.parametrize("frames", [2, 3, 5, 30, 61, 180])
    @pytest.mark.parametrize("fps", [0.5, 1.0, 2.0, 3.7, 1_000.0])
    def test_frames_are_those_of_the_reference(self, rate: Fraction, frames: int, fps: float) -> None:
        for container, codec in (("mp4", "libx264"), ("webm", "libvpx")):
            video = decoded(video_file(container, codec, frames=frames, rate=rate), fps=fps)
            count = reference_count(frames, float(rate), fps)
            assert evenly_spread(numbers_of(video), frames, count)
            assert video.fps == pytest.approx(count / frames * float(rate), rel=1e-12)

    @pytest.mark.parametrize(
        ("frames", "fps", "expected"),
        [
            (3, 2.0, [0, 2]),
            (4, 2.0, [0, 1, 2, 3]),
            (7, 2.0, [0, 2, 4, 6]),
            (60, 2.0, [0, 20, 39, 59]),
            (61, 3.0, [0, 12, 24, 36, 48, 60]),
            (30, 30.0, list(range(30))),
            (31, 30.0, [round(place * 30 / 29) for place in range(30)]),
        ],
    )
    def test_known_cases(self, frames: int, fps: float, expected: list[int]) -> None:
        assert numbers_of(decoded(video_file(frames=frames), fps=fps)) == expected

    @pytest.mark.parametrize(
        ("num_frames", "expected"),
        [(1, [0, 60]), (2, [0, 60]), (7, [0, 12, 24, 36, 48, 60]), (61, list(np.rint(np.linspace(0, 60, 60)))),
         (10**9, list(np.rint(np.linspace(0, 60, 60))))],
    )  # fmt: skip
    def test_as_many_frames_as_a_client_says(self, num_frames: int, expected: list[int]) -> None:
        video = decoded(video_file(frames=61, rate=10), fps=2.0, num_frames=num_frames)
        assert numbers_of(video) == expected and video.fps == pytest.approx(len(expected) / 6.1)
        few = decoded(video_file(frames=61, rate=10), limited(max_frames=5), num_frames=num_frames)
        assert len(few.frames) == min(4, len(expected))

    @pytest.mark.parametrize(("max_frames", "count"), [(2, 2), (3, 2), (4, 4), (7, 6), (11, 10), (12, 12), (13, 12)])
    def test_no_more_frames_than_the_limit(self, max_frames: int, count: int) -> None:
        video = decoded(video_file(frames=180), limited(max_frames=max_frames))
        assert evenly_spread(numbers_of(video), 180, count)
        assert video.fps == pytest.approx(count / 6)

    def test_one_frame_is_given_twice(self) -> None:
        video = decoded(video_file(frames=1))
        assert numbers_of(video) == [0, 0]
        assert math.isfinite(video.fps) and video.fps > 0

    @pytest.mark.parametrize("hidden", [[10], [29], [3, 4, 5, 17]])
    def test_packets_that_show_nothing_are_not_counted(self, hidden: list[int]) -> None:
        packets = vp8_packets(30)
        for number in hidden:
            packets[number] = bytes([packets[number][0] & ~0x10]) + packets[number][1:]
        shown = [number for number in range(30) if number not in hidden]
        numbers = numbers_of(decoded(vp8_file(packets), fps=8.0))
        assert evenly_spread([shown.index(number) for number in numbers], len(shown), len(numbers))

    @pytest.mark.parametrize("fps", [0.0, -1.0, math.nan, math.inf])
    def test_a_rate_that_is_none_is_refused(self, fps: float) -> None:
        refused("the rate must be a number above 0", 400, lambda: decoded(video_file(), fps=fps))


class TestLimits:
    def test_seconds(self) -> None:
        assert decoded(video_file(frames=60), limited(max_s=2.0)).frames.shape[0] == 4
        refused(r"lasts longer than 1\.99 s", 413, lambda: decoded(video_file(frames=60), limited(max_s=1.99)))
        refused("lasts longer than 2 s", 413, lambda: decoded(video_file(frames=61), limited(max_s=2.0)))

    @pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx")])
    def test_frames_of_the_file(self, container: str, codec: str) -> None:
        assert decoded(video_file(container, codec, 120, 480), limited(max_s=1.0)).frames.shape[0] == 4
        over = video_file(container, codec, 121, 480)
        refused("more than 120 frames, which are 120 for each of the 1 s", 413, lambda: decoded(over, limited(1.0)))

    def test_pixels_of_a_frame(self) -> None:
        pixels = WIDTH * HEIGHT
        assert decoded(video_file(), limited(max_frame_pixels=pixels)).frames.shape[1:3] == (HEIGHT, WIDTH)
        over = limited(max_frame_pixels=pixels - 1)
        refused("frames of 64 x 48 pixels, more than the 3071 pixels", 413, lambda: decoded(video_file(), over))

    def test_pixels_of_a_later_frame(self) -> None:
        data = vp8_file([*vp8_packets(10), *vp8_packets(10, (128, 96))])
        refused("frames of 128 x 96 pixels, more than the 3072", 413, lambda: decoded(data, limited(60, 8, 3_072)))
        data = vp8_file([*vp8_packets(10), *vp8_packets(2, (1_024, 1_024))])
        refused("cannot be read as a video", 400, lambda: decoded(data, limited(60, 8, 3_072)))

    def test_fewer_than_two_frames_are_no_limit(self) -> None:
        with pytest.raises(ValueError, match="at least 2 frames"):
            limited(max_frames=1)

    def test_a_long_video_keeps_few_frames(self) -> None:
        data = video_file(frames=2_000, rate=60)
        decoded(data)
        tracemalloc.start()
        video = decoded(data, limited(max_frames=8))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert video.frames.nbytes == 8 * WIDTH * HEIGHT * 3
        assert peak_bytes < video.frames.nbytes + 200_000


def as_png(image: Image.Image) -> Picture:
    file = io.BytesIO()
    image.save(file, "PNG")
    return read_picture(file.getvalue(), max_pixels=1_000_000, param=PARAM)


class TestDepth:
    @pytest.mark.parametrize(
        ("container", "codec", "layout"),
        [
            ("mp4", "libx265", "yuv420p10le"),
            ("mp4", "libx265", "yuv420p12le"),
            ("mp4", "libx264", "yuv444p10le"),
            ("webm", "libsvtav1", "yuv420p10le"),
        ],
    )
    def test_frames_of_more_than_8_bits_are_scaled(self, container: str, codec: str, layout: str) -> None:
        deep = decoded(ramp_film(container, codec, layout)).frames
        plain = decoded(ramp_film("mp4", "libx264", "yuv420p")).frames
        assert deep.shape == plain.shape
        assert np.abs(deep.astype(int) - plain).mean() < 3
        assert deep[0, :, 8].mean() < 40 and deep[0, :, -8].mean() > 215

    def test_pictures_of_16_bits_are_scaled(self) -> None:
        ramp = np.tile(np.arange(0, 256, 4, np.uint16), (48, 1))
        deep, plain = (as_png(Image.fromarray(values)) for values in (ramp * 257, ramp.astype(np.uint8)))
        made = [video_of_frames([each] * 2, fps=2.0, limits=LIMITS, param=PARAM) for each in (deep, plain)]
        assert np.array_equal(made[0].frames, made[1].frames)


class TestShapes:
    @pytest.mark.parametrize("size", [(100, 1), (2, 3)])
    def test_pictures_too_low_are_refused(self, size: tuple[int, int]) -> None:
        words = f"has frames of {size[0]} x {size[1]} pixels, but at least 4 pixels of height are needed"
        low = np.zeros((size[1], size[0], 3), np.uint8)
        refused(words, 400, lambda: framed([Image.fromarray(low)] * 2))

    def test_the_lowest_pictures_are_taken(self) -> None:
        assert framed([Image.new("RGB", (8, 4))] * 2).frames.shape == (2, 4, 8, 3)

    @pytest.mark.parametrize("size", [(2_048, 8), (16, 4_096)])
    def test_files_too_narrow_are_refused(self, size: tuple[int, int]) -> None:
        words = f"has frames of {size[0]} x {size[1]} pixels, but a side may be at most 200 times as long as the other"
        refused(words, 400, lambda: decoded(video_file(frames=2, size=size)))

    def test_files_too_low_are_refused(self) -> None:
        refused("has frames of 64 x 2 pixels, but at least 4", 400, lambda: decoded(video_file(frames=2, size=(64, 2))))


class TestHeadersThatLie:
    @pytest.mark.parametrize("kind", [b"mvhd", b"tkhd", b"mdhd"])
    @pytest.mark.parametrize("duration", [1, 0x7FFFFFFF])
    def test_a_duration_in_mp4(self, kind: bytes, duration: int) -> None:
        data = video_file(frames=90)
        place = box_place(data, kind) + (20 if kind == b"tkhd" else 16)
        video = decoded(patched(data, place, struct.pack(">I", duration)))
        assert numbers_of(video) == [0, 18, 36, 53, 71, 89] and video.fps == pytest.approx(2.0)

    @pytest.mark.parametrize("frame_ns", [1_000_000, 100_000_000])
    def test_a_rate_in_webm(self, frame_ns: int) -> None:
        data = video_file("webm", "libvpx", frames=93)
        place = data.index(b"\x23\xe3\x83") + 3
        size = data[place] & 0x7F
        video = decoded(patched(data, place + 1, frame_ns.to_bytes(8, "big")[8 - size :]))
        assert evenly_spread(numbers_of(video), 93, 6)
        # 3.1 s; how long the last frame lasts is nowhere else.
        assert 6 / video.fps == pytest.approx(92 / 30 + frame_ns / 1e9, abs=0.002)

    def test_frames_that_are_larger_than_said(self) -> None:
        data = video_file(size=(640, 480), frames=4)
        place = data.index(b"avc1", data.index(b"stsd")) + 28
        small = patched(data, place, struct.pack(">HH", WIDTH, HEIGHT))
        refused("frames of 640 x 480", 413, lambda: decoded(small, limited(max_frame_pixels=WIDTH * HEIGHT)))

    def test_stamps_that_run_past_the_limit(self) -> None:
        data = video_file(frames=30)
        place = box_place(data, b"stts") + 12
        refused("lasts longer than 60 s", 413, lambda: decoded(patched(data, place, struct.pack(">I", 1 << 24))))

    def test_stamps_that_stand_still_do_not_hide_frames(self) -> None:
        data = video_file(frames=130)
        still = patched(data, box_place(data, b"stts") + 12, struct.pack(">I", 0))
        refused("more than 120 frames", 413, lambda: decoded(still, limited(max_s=1.0)))

    def test_samples_that_a_table_claims(self) -> None:
        data = video_file()
        place = box_place(data, b"stsz") + 4
        chunk = box_place(data, b"stsc") + 12
        claim = patched(patched(data, place, struct.pack(">II", 1, 80_000_000)), chunk, struct.pack(">I", 80_000_000))
        quickly_refused(claim)

    def test_samples_that_a_fragment_claims(self) -> None:
        data = video_file(movflags="frag_keyframe+empty_moov+default_base_moof")
        quickly_refused(patched(data, box_place(data, b"trun"), struct.pack(">II", 1, 80_000_000)))

    def test_edits_that_repeat_the_samples(self) -> None:
        data = video_file()
        quickly_refused(patched(data, box_place(data, b"elst") + 4, struct.pack(">I", 4_000_000)))

    @pytest.mark.parametrize("outer", [b"mdat", b"free", b"uuid"])
    def test_a_claim_is_found_behind_a_box_that_is_cut(self, outer: bytes) -> None:
        data = video_file(movflags="faststart")
        place = data.index(b"stsz")
        claim = patched(data, place + 8, struct.pack(">II", 1, 80_000_000))
        quickly_refused(claim[:32] + struct.pack(">I4s", 0x7FFFFFFF, outer) + claim[32:])

    def test_a_header_that_is_compressed(self) -> None:
        data = video_file()
        quickly_refused(data.replace(b"mvhd", b"cmov"))


def quickly_refused(data: bytes) -> None:
    start = time.process_time()
    refused("cannot be read as a video", 400, lambda: decoded(data))
    assert time.process_time() - start < 1.0


class TestSound:
    def test_16_khz_mono_samples_are_exact(self) -> None:
        values = np.random.default_rng(0).integers(-32768, 32768, 16_000).astype(np.int16)
        audio = decoded(pcm_mov(values, 16_000, "mono"), with_audio=True).audio
        assert audio is not None and audio.dtype == np.float32
        assert np.array_equal(audio, values.astype(np.float32) / 32768)

    def test_channels_are_averaged_with_equal_weight(self) -> None:
        values = np.random.default_rng(1).integers(-32768, 32768, (16_000, 6)).astype(np.int16)
        audio = decoded(pcm_mov(values, 16_000, "5.1"), with_audio=True).audio
        assert audio is not None
        assert np.allclose(audio, (values.astype(np.float64) / 32768).mean(axis=1), atol=1e-6)

    @pytest.mark.parametrize(
        ("container", "codec", "sound"),
        [
            ("mp4", "libx264", "aac"),
            ("mp4", "libx264", "libmp3lame"),
            ("mov", "libx264", "pcm_s16le"),
            ("webm", "libvpx", "libopus"),
            ("matroska", "libx264", "vorbis"),
            ("mp4", "libx264", "flac"),
        ],
    )
    def test_each_codec_is_read(self, container: str, codec: str, sound: str) -> None:
        video = decoded(video_file(container, codec, frames=90, sound=sound), with_audio=True)
        assert video.audio is not None and abs(video.audio.size - 48_000) < 1_700
        assert np.argmax(np.abs(np.fft.rfft(video.audio[8_000:40_000]))) == 880
        assert numbers_of(video) == [0, 18, 36, 53, 71, 89]

    def test_it_is_left_out_unless_asked_for(self) -> None:
        assert decoded(video_file(sound="aac")).audio is None

    def test_a_video_without_a_track_is_refused(self) -> None:
        error = refused(
            "has no sound track; leave use_audio_in_video out", 400, lambda: decoded(video_file(), with_audio=True)
        )
        assert error.code == "no_sound_track"

    def test_seconds(self) -> None:
        data = pcm_mov(np.zeros(16_000, np.int16), 16_000, "mono")
        video = decoded(data, with_audio=True, max_audio_s=1.0)
        assert video.audio is not None and video.audio.size == 16_000
        refused(r"longer than 0\.99 s", 413, lambda: decoded(data, with_audio=True, max_audio_s=0.99))

    def test_sound_in_pieces_of_one_sample_is_refused(self) -> None:
        data = matroska_in_pieces(16_000)
        audio = decoded(data, with_audio=True, max_audio_s=32.0).audio
        assert audio is not None and audio.size == 16_000
        refused("cannot be read as a video", 400, lambda: decoded(data, with_audio=True, max_audio_s=31.9))

    @pytest.mark.parametrize("largest", [1e18, 1e30, 3e38])
    @pytest.mark.parametrize("rate", [16_000, 44_100])
    def test_samples_that_no_recording_has_are_refused(self, largest: float, rate: int) -> None:
        data = pcm_mov(np.full(rate, largest, np.float32), rate, "mono")
        words = rf"has samples as large as {largest:g}, but at most 32768 is accepted".replace("+", r"\+")
        refused(words, 400, lambda: decoded(data, with_audio=True))
        assert decoded(data).audio is None

    def test_samples_that_are_no_numbers_are_refused(self) -> None:
        data = pcm_mov(np.full(16_000, np.nan, np.float32), 16_000, "mono")
        refused("has samples that are infinite or no numbers", 400, lambda: decoded(data, with_audio=True))

    def test_a_track_too_short_to_be_heard_is_refused(self) -> None:
        words = r"has 20 ms of sound, but at least 20\.0625 ms are needed"
        refused(words, 400, lambda: decoded(pcm_mov(np.zeros(320, np.int16), 16_000, "mono"), with_audio=True))
        audio = decoded(pcm_mov(np.zeros(321, np.int16), 16_000, "mono"), with_audio=True).audio
        assert audio is not None and audio.size == 321

    def test_an_absurd_rate_is_named(self) -> None:
        data = pcm_mov(np.zeros(2_000, np.int16), 2_000, "mono")
        refused("2000 samples a second", 400, lambda: decoded(data, with_audio=True))

    def test_a_codec_that_is_not_listed_is_refused(self) -> None:
        data = video_file("matroska", "libx264", sound="ac3")
        assert decoded(data).frames.shape[0] == 4
        refused("sound of a codec that is not accepted", 415, lambda: decoded(data, with_audio=True))


def matroska_in_pieces(samples: int) -> bytes:
    """One second of four frames and of sound that has each of its samples in a packet of its own."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=4)
        stream.codec_context.thread_count = 1
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        track = output.add_stream("pcm_s16le", rate=samples, layout="mono")
        for number in range(4):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(number), format="rgb24")))
        output.mux(stream.encode(None))
        for number in range(samples):
            packet = av.Packet(b"\0\1")
            packet.stream, packet.time_base = track, Fraction(1, samples)
            packet.pts = packet.dts = number
            output.mux(packet)
    return file.getvalue()


class TestScaling:
    def test_frames_below_the_bound_are_as_decoded(self) -> None:
        image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (1_080, 1_920, 3)).astype(np.uint8))
        count = FRAMES.kept_pixels // (1_080 * 1_920) // 2 * 2
        video = framed([image] * count, limits=limited(max_frame_pixels=10**7))
        assert np.array_equal(video.frames[-1], np.asarray(image))

    def test_frames_above_it_are_what_transformers_makes_of_them(self) -> None:
        from transformers import Qwen2VLVideoProcessor

        processor = Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
        picture = np.random.default_rng(3).integers(0, 256, (1_080, 1_920, 3)).astype(np.uint8)
        video = framed([Image.fromarray(picture)] * 20, limits=limited(max_frame_pixels=10**7))
        assert video.frames.shape == (20, 560, 1_008, 3)
        own, whole = (
            processor(videos=[frames], return_tensors="pt")["pixel_values_videos"]
            for frames in (video.frames[:2], np.stack([picture] * 2))
        )
        assert own.equal(whole)

    def test_frames_that_the_model_needs_whole_are_kept(self) -> None:
        image = Image.new("RGB", (854, 480))
        assert framed([image] * 110).frames.shape == (110, 480, 854, 3)

    def test_a_file_is_scaled_too(self) -> None:
        data = video_file("mp4", "libx264", frames=44, size=(1_280, 720))
        video = decoded(data, fps=30.0)
        assert video.frames.shape == (44, 560, 1_008, 3)
        assert numbers_of(video) == list(range(44))

    @pytest.mark.parametrize("size", [(8_000, 120), (120, 8_000)])
    def test_long_frames_keep_a_side(self, size: tuple[int, int]) -> None:
        video = framed([Image.new("RGB", size)] * 42)
        assert min(video.frames.shape[1:3]) >= 28

    @pytest.mark.parametrize(("size", "kept"), [((14_000, 71), "10892 x 28"), ((71, 14_000), "28 x 10892")])
    def test_frames_that_scaling_makes_too_narrow_are_refused(self, size: tuple[int, int], kept: str) -> None:
        assert framed([Image.new("RGB", size)] * 2).frames.shape[1:3] == size[::-1]
        words = f"has frames that are scaled to {kept} pixels, but a side may be at most 200 times as long"
        refused(words, 400, lambda: framed([Image.new("RGB", size)] * 42))


def test_frames_are_chosen_as_torch_would() -> None:
    rng = np.random.default_rng(0)
    for total in [*range(2, 200), *rng.integers(200, 36_001, 800).tolist()]:
        for count in {2, min(4, total), min(128, total), int(rng.integers(2, min(128, total) + 1))}:
            expected = torch.linspace(0, total - 1, count).round().long().tolist()
            assert spread_indices(total, count) == expected, (total, count)


def framed(images: Sequence[Image.Image], fps: float = 2.0, limits: VideoLimits = LIMITS) -> Video:
    return video_of_frames([picture(image) for image in images], fps=fps, limits=limits, param=PARAM)


@functools.cache
def picture_bytes(size: tuple[int, int], pixels: bytes) -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", size, pixels).save(file, "PNG")
    return file.getvalue()


def picture(image: Image.Image) -> Picture:
    return read_picture(picture_bytes(image.size, image.tobytes()), max_pixels=10**7, param=PARAM)


class TestFrames:
    @pytest.mark.parametrize("count", [1, 2, 3, 6, 7])
    def test_they_are_taken_as_given_and_the_last_makes_them_even(self, count: int) -> None:
        video = framed([Image.fromarray(numbered(number)) for number in range(count)], fps=1.5)
        assert numbers_of(video) == [*range(count), *[count - 1] * (count % 2)]
        assert np.array_equal(video.frames[0], numbered(0))
        assert (video.fps, video.audio, video.frames.dtype) == (1.5, None, np.uint8)

    def test_none_are_refused(self) -> None:
        refused("has no frames", 400, lambda: framed([]))

    def test_sizes_that_differ_are_refused(self) -> None:
        images = [Image.new("RGB", (64, 48)), Image.new("RGB", (48, 64))]
        refused("frames of 64 x 48 and of 48 x 64 pixels", 400, lambda: framed(images))

    @pytest.mark.parametrize(("max_frames", "accepted"), [(2, 2), (4, 4), (5, 4)])
    def test_their_number(self, max_frames: int, accepted: int) -> None:
        image = Image.new("RGB", (8, 8))
        limits = limited(max_frames=max_frames)
        assert framed([image] * accepted, limits=limits).frames.shape[0] == accepted
        over = [image] * (accepted + 1)
        refused(f"{accepted + 1} frames, but at most {accepted}", 413, lambda: framed(over, limits=limits))

    def test_their_pixels(self) -> None:
        image = Image.new("RGB", (8, 8))
        assert framed([image], limits=limited(max_frame_pixels=64)).frames.shape == (2, 8, 8, 3)
        refused("more than the 63 pixels", 413, lambda: framed([image], limits=limited(max_frame_pixels=63)))

    def test_their_seconds(self) -> None:
        images = [Image.new("RGB", (8, 8))] * 4
        assert framed(images, fps=2.0, limits=limited(max_s=2.0)).fps == 2.0
        refused("lasts longer than 2 s", 413, lambda: framed(images, fps=1.9, limits=limited(max_s=2.0)))

    @pytest.mark.parametrize("fps", [0.0, -2.0, math.nan, math.inf])
    def test_a_rate_that_is_none_is_refused(self, fps: float) -> None:
        refused("the rate must be a number above 0", 400, lambda: framed([Image.new("RGB", (8, 8))], fps=fps))


WHOLE_FILES: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: video_file(sound="aac"),
    "faststart": lambda: video_file(movflags="faststart", sound="aac"),
    "fragments": lambda: video_file(movflags="frag_keyframe+empty_moov", sound="aac"),
    "hevc": lambda: video_file(codec="libx265"),
    "av1": lambda: video_file(codec="libsvtav1"),
    "vp8": lambda: video_file("webm", "libvpx", sound="libopus"),
    "vp9": lambda: video_file("webm", "libvpx-vp9"),
}


class TestDamage:
    @pytest.mark.parametrize("name", WHOLE_FILES)
    def test_a_file_that_ends_early(self, name: str) -> None:
        data = WHOLE_FILES[name]()
        for part in range(50):
            outcome_is_proper(data[: len(data) * part // 50])

    @pytest.mark.parametrize("name", WHOLE_FILES)
    @pytest.mark.parametrize("seed", range(20))
    def test_bytes_that_changed(self, name: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        data = np.frombuffer(WHOLE_FILES[name](), np.uint8).copy()
        places = (rng.random(1 + seed) ** rng.integers(1, 4) * data.size).astype(int)
        data[places] = rng.integers(0, 256, places.size)
        outcome_is_proper(data.tobytes())

    def test_an_mp4_cut_in_the_middle_is_refused(self) -> None:
        data = video_file()
        refused("cannot be read as a video", 400, lambda: decoded(data[: len(data) // 2]))


def outcome_is_proper(data: bytes) -> None:
    for with_audio in (False, True):
        try:
            video = decoded(data, limited(20.0, 16, 100_000), with_audio=with_audio)
        except BadRequest as error:
            assert error.param == PARAM and not any(leak in error.message for leak in LEAKS), error.message
            continue
        assert video.frames.dtype == np.uint8 and 2 <= video.frames.shape[0] <= 16
        assert video.frames.shape[0] % 2 == 0 and video.frames.shape[3] == 3
        assert math.isfinite(video.fps) and video.fps > 0
        assert (video.audio is not None) == with_audio
