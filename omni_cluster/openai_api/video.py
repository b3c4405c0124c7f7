"""Videos that came inside a request, decoded under limits: a file or a list of pictures to the frames of the model.

A file's claims are checked against its contents: frames are counted, their time is taken from their stamps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.containers import FAULTS, is_decoded_by, is_matroska, is_mov, opened, read_only
from omni_cluster.openai_api.errors import BadRequest, lasts_too_long
from omni_cluster.openai_api.kept_frames import scaled, spread_indices
from omni_cluster.openai_api.media import Block, Picture, check_aspect_ratio, check_length, mono_blocks, resampled
from omni_cluster.types.media import ALL_FRAMES, FramePolicy, Video

Demuxer = Literal["mov", "matroska"]

MAX_FILE_FPS: Final = 120

_VIDEO_CODECS: Final = ("h264", "hevc", "vp8", "vp9", "libdav1d")
_AUDIO_CODECS: Final = (
    "aac", "mp3float", "mp3", "opus", "vorbis", "flac", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le",
    "pcm_s32be", "pcm_u8", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be", "pcm_mulaw", "pcm_alaw",
)  # fmt: skip
MIN_FRAME_HEIGHT: Final = 4
"""Of pictures in time with 1 or 3 rows, the processors take the rows for the channels."""

# A rate that a file states is taken where its stamps agree so far: a frame that was dropped does not change it.
_RATE_TOLERANCE: Final = Fraction(1, 20)
# Coded frames are larger than shown ones, by up to a block on each side.
_CODED_MARGIN_PIXELS: Final = 65_536
# The shortest packets of sound are Opus's, 400 a second. Work goes by packets: in some files one can be one sample.
_SOUND_BLOCKS_PER_S: Final = 500


@dataclass(frozen=True)
class VideoLimits:
    """What one video may be: seconds of the file, frames that go to the model, pixels of one frame.

    `frames`: which of them the model is shown, and how large.
    """

    max_s: float
    max_frames: int
    max_frame_pixels: int
    frames: FramePolicy = ALL_FRAMES

    def __post_init__(self) -> None:
        if self.max_frames < (least := self.frames.together):
            raise ValueError(f"max_frames is {self.max_frames}, but a video has at least {least} frames.")

    @property
    def most_frames(self) -> int:
        """The largest number of frames that the model takes."""
        return self.frames.whole(self.max_frames)

    @property
    def max_file_frames(self) -> int:
        """Frames of a file that are decoded at most: `MAX_FILE_FPS` for each second."""
        return int(self.max_s * MAX_FILE_FPS)


@dataclass(frozen=True)
class _File:
    data: bytes
    demuxer: Demuxer
    limits: VideoLimits
    budget: Budget
    param: str


def decode_video(
    data: bytes,
    *,
    limits: VideoLimits,
    fps: float,
    num_frames: int | None = None,
    with_audio: bool,
    max_audio_s: float,
    budget: Budget,
    param: str,
) -> Video:
    """Frames of an mp4, mov, webm or matroska file, and its sound when `with_audio`.

    `fps` of them a second, or `num_frames` where it is given: as many as `limits.frames` says of that, at most
    `limits.max_frames`, spread evenly from the first to the last. `Video.fps` is their own rate. A file with fewer
    frames than the model takes together gives one of them twice.

    Frames are uint8 RGB `[T, H, W, 3]` as decoded, turned by quarters as the file's display matrix says (mirroring is
    not honoured). Only where all of them together have more than `limits.frames.kept_pixels`, larger ones than the
    model needs are scaled to the size that its processor would give them, by the same interpolation. The sound is the
    first sound track: float32, mono, 16 kHz, by the rules of `media.decode_audio`.

    Raises BadRequest that names `param`: 415 for another container or codec; 413 for more than `limits.max_s` seconds,
    more than 120 frames for each of them, frames above `limits.max_frame_pixels`, or more than `max_audio_s` of sound;
    400 for a file that is damaged, has no video, changes its size, has frames that are too narrow or too low, or has no
    sound track when `with_audio`, or one that is too short. What the video decodes to is taken from `budget`, its
    frames before there is memory for them.
    """
    file = _File(data, _demuxer_of(data, param), limits, budget, param)
    _check_fps(fps, param)
    try:
        timing = _timing(file)
        audio = _sound(file, max_audio_s) if with_audio else None
        frames, sampled_fps = _sampled(file, timing, fps, num_frames)
    except MemoryError:
        raise
    except FAULTS:
        raise _unreadable(param) from None
    budget.take(frames.nbytes, param)
    return Video(frames, sampled_fps, audio)


def take_frames(pictures: Sequence[Picture], limits: VideoLimits, budget: Budget, param: str) -> None:
    """Takes from `budget` what pictures come to as a video. Raises BadRequest for what their headers tell."""
    _check_pictures(pictures, limits, param)
    width, height = pictures[0].size
    count = limits.frames.filled(len(pictures))
    budget.take(count * math.prod(limits.frames.kept_size(count, height, width)) * 3, param)


def video_of_frames(pictures: Sequence[Picture], *, fps: float, limits: VideoLimits, param: str) -> Video:
    """The video of pictures that are its frames in order, `fps` of them a second; the last one is repeated as needed.

    What `decode_video` says of scaling holds here too. They are decoded one after the other, and kept as they are
    scaled.
    Raises BadRequest that names `param`: no frames, sizes that differ, an `fps` that is not above 0; 413 for more than
    `limits.max_frames`, more than `limits.max_s` seconds, or frames above `limits.max_frame_pixels`.
    """
    _check_fps(fps, param)
    _check_pictures(pictures, limits, param)
    if len(pictures) / fps > limits.max_s:
        raise lasts_too_long("video", limits.max_s, param)
    count = limits.frames.filled(len(pictures))
    first = pictures[0].decode()
    _check_shape(count, first.shape, limits, param)
    frames = np.empty((count, *limits.frames.kept_size(count, *first.shape[:2]), 3), np.uint8)
    for place, picture in enumerate(_of_one_size(first, pictures, param)):
        frames[place] = scaled(picture, frames.shape[1:3])
    frames[len(pictures) :] = frames[len(pictures) - 1]
    return Video(frames, fps)


def _of_one_size(
    first: npt.NDArray[np.uint8], pictures: Sequence[Picture], param: str
) -> Iterator[npt.NDArray[np.uint8]]:
    yield first
    for each in pictures[1:]:
        picture = each.decode()
        if picture.shape != first.shape:
            raise _changing_size(_size(first), _size(picture), param)
        yield picture


def _size(picture: npt.NDArray[np.uint8]) -> tuple[int, int]:
    return picture.shape[1], picture.shape[0]


# -------------------------------------------------------------------- sampling


def _sampled(file: _File, timing: _Timing, fps: float, num_frames: int | None) -> tuple[npt.NDArray[np.uint8], float]:
    """The chosen frames and their rate. Packets are not always frames: then they are chosen again by the true count."""
    total = timing.packets
    for _ in range(2):
        file_fps = timing.file_fps(total) or fps
        _check_duration(total / file_fps, file)
        chosen = spread_indices(total, _count(file.limits, total, file_fps, fps, num_frames))
        frames, decoded = _frames_at(chosen, file)
        if decoded == total:
            return frames, len(chosen) / total * file_fps
        del frames
        total = decoded
    raise ValueError("two passes counted different frames")


def _count(limits: VideoLimits, total: int, file_fps: float, fps: float, num_frames: int | None) -> int:
    if num_frames is None:
        return limits.frames.count(total, file_fps, fps, limits.max_frames)
    return limits.frames.count_of(num_frames, total, limits.max_frames)


# ------------------------------------------------------------------------ file


def _demuxer_of(data: bytes, param: str) -> Demuxer:
    if is_mov(data):
        return "mov"
    if is_matroska(data):
        return "matroska"
    raise BadRequest(
        f"{param} is no mp4, mov, webm or matroska file; send one of these.",
        param=param,
        code="unsupported_video",
        status=415,
    )


def _opened(file: _File) -> InputContainer:
    return opened(file.data, file.demuxer, _VIDEO_CODECS + _AUDIO_CODECS, {"max_pixels": _decoder_max_pixels(file)})


def _decoder_max_pixels(file: _File) -> str:
    return str(2 * file.limits.max_frame_pixels + _CODED_MARGIN_PIXELS)


def _video_stream(container: InputContainer, file: _File) -> VideoStream:
    """The first video that is no cover picture, ready to be decoded; other streams are not read."""
    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        raise BadRequest(f"{file.param} has no video in it; send a file with one.", param=file.param, code="no_video")
    stream = streams[0]
    if not is_decoded_by(stream, _VIDEO_CODECS):
        raise _unsupported_codec("video", "h264, hevc, vp8, vp9 or av1", file.param)
    _check_pixels(stream.codec_context.width, stream.codec_context.height, file.limits, file.param)
    stream.codec_context.options = {"max_pixels": _decoder_max_pixels(file)}
    # One each, because requests share the machine.
    stream.codec_context.thread_count = 1
    read_only(stream, container)
    return stream


def _audio_stream(container: InputContainer, param: str) -> AudioStream:
    streams = container.streams.audio
    if not streams:
        raise _no_sound(param)
    if not is_decoded_by(streams[0], _AUDIO_CODECS):
        raise _unsupported_codec("sound", "aac, mp3, opus, vorbis, flac or pcm", param)
    read_only(streams[0], container)
    return streams[0]


# ---------------------------------------------------------------------- timing


@dataclass(frozen=True)
class _Timing:
    """What the packets of a video say: how many, how long they last (0: nothing said), and the stated rate."""

    packets: int
    measured_s: Fraction
    stated_fps: Fraction | None

    def file_fps(self, frames: int) -> float | None:
        """Frames a second of the file: the stated rate, as the reference takes it, unless the stamps contradict it."""
        if self.stated_fps and self._agrees(frames / self.stated_fps):
            return float(self.stated_fps)
        return float(frames / self.measured_s) if self.measured_s else None

    def _agrees(self, stated_s: Fraction) -> bool:
        return not self.measured_s or abs(stated_s - self.measured_s) <= self.measured_s * _RATE_TOLERANCE


def _timing(file: _File) -> _Timing:
    """Reads all packets of the video, decodes none; stops where a limit is passed."""
    with _opened(file) as container:
        stream = _video_stream(container, file)
        tick_s = stream.time_base or Fraction(0)
        packets, first, last, last_ticks = 0, None, 0, 0
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:
                continue
            packets += 1
            _check_file_frames(packets, file)
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is None:
                continue
            if first is None or stamp >= last:
                last, last_ticks = stamp, max(packet.duration or 0, 0)
            first = stamp if first is None else min(first, stamp)
            _check_duration((last - first) * tick_s, file)
        if not packets:
            raise ValueError("no packets")
        span_s = (last - (first or 0)) * tick_s
        last_s = last_ticks * tick_s or span_s / max(packets - 1, 1)
        return _Timing(packets, span_s + last_s, stream.average_rate or None)


# ---------------------------------------------------------------------- frames


def _frames_at(chosen: Sequence[int], file: _File) -> tuple[npt.NDArray[np.uint8], int]:
    """The frames of these numbers, ascending, and how many frames there are; no others are held."""
    frames = np.empty((0, 0, 0, 3), np.uint8)
    copies = Counter(chosen)
    place = decoded = 0
    for decoded, frame in enumerate(_decoded(file), start=1):
        if not copies[decoded - 1]:
            continue
        picture = _picture(frame)
        if not place:
            frames = _room_for(len(chosen), picture, file)
        end = place + copies[decoded - 1]
        frames[place:end] = scaled(picture, frames.shape[1:3])
        place = end
    if not decoded:
        raise ValueError("no frames")
    return frames, decoded


def _room_for(count: int, picture: npt.NDArray[np.uint8], file: _File) -> npt.NDArray[np.uint8]:
    _check_shape(count, picture.shape, file.limits, file.param)
    shape = count, *file.limits.frames.kept_size(count, *picture.shape[:2]), 3
    file.budget.check(math.prod(shape), file.param)
    return np.empty(shape, np.uint8)


def _decoded(file: _File) -> Iterator[VideoFrame]:
    """All frames in the order of showing. Raises BadRequest for one that breaks a limit or has another size."""
    size: tuple[int, int] | None = None
    with _opened(file) as container:
        for number, frame in enumerate(_stream_frames(container, _video_stream(container, file)), start=1):
            _check_file_frames(number, file)
            _check_pixels(frame.width, frame.height, file.limits, file.param)
            size = size or (frame.width, frame.height)
            if size != (frame.width, frame.height):
                raise _changing_size(size, (frame.width, frame.height), file.param)
            yield frame


def _stream_frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    for packet in container.demux(stream):
        # An empty packet in the middle would end the decoder.
        if packet.size:
            yield from stream.decode(packet)
    yield from stream.decode(None)


def _picture(frame: VideoFrame) -> npt.NDArray[np.uint8]:
    rgb = frame.to_ndarray(format="rgb24")
    quarters, rest = divmod(frame.rotation, 90)
    return np.ascontiguousarray(np.rot90(rgb, 0 if rest else quarters), np.uint8)


def _sound(file: _File, max_audio_s: float) -> npt.NDArray[np.float32]:
    with _opened(file) as container:
        stream = _audio_stream(container, file.param)
        blocks = mono_blocks(container, stream, max_audio_s, file.param)
        samples = resampled(_at_most(math.ceil(max_audio_s * _SOUND_BLOCKS_PER_S), blocks))
    if not samples.size:
        raise _no_sound(file.param)
    check_length(samples, file.param)
    file.budget.take(samples.nbytes, file.param)
    return samples


def _at_most(count: int, blocks: Iterator[Block]) -> Iterator[Block]:
    for number, block in enumerate(blocks):
        if number == count:
            raise ValueError("too many audio packets")
        yield block


# -------------------------------------------------------------------- refusals


def _check_fps(fps: float, param: str) -> None:
    if not (fps > 0 and math.isfinite(fps)):
        raise BadRequest(
            f"{param} is asked for with {fps:g} frames a second, but the rate must be a number above 0.",
            param=param,
            code="bad_fps",
        )


def _check_pictures(pictures: Sequence[Picture], limits: VideoLimits, param: str) -> None:
    if not pictures:
        raise BadRequest(f"{param} has no frames; send at least one picture.", param=param, code="bad_video")
    if len(pictures) > limits.most_frames:
        raise BadRequest(
            f"{param} has {len(pictures)} frames, but at most {limits.most_frames} are accepted.",
            param=param,
            code="too_many_frames",
            status=413,
        )
    for picture in pictures:
        _check_pixels(*picture.size, limits, param)
        # One that is turned when it is decoded has its sides the other way round here.
        if sorted(picture.size) != sorted(pictures[0].size):
            raise _changing_size(pictures[0].size, picture.size, param)


def _check_pixels(width: int, height: int, limits: VideoLimits, param: str) -> None:
    if width * height > limits.max_frame_pixels:
        raise BadRequest(
            f"{param} has frames of {width} x {height} pixels, more than the {limits.max_frame_pixels} pixels "
            "that are accepted.",
            param=param,
            code="video_frame_too_large",
            status=413,
        )


def _check_shape(count: int, shape: tuple[int, ...], limits: VideoLimits, param: str) -> None:
    """Of frames as they are shown, and as they are kept: scaling floors the shorter side."""
    height, width = shape[:2]
    if height < MIN_FRAME_HEIGHT:
        raise BadRequest(
            f"{param} has frames of {width} x {height} pixels, but at least {MIN_FRAME_HEIGHT} pixels of height are "
            "needed.",
            param=param,
            code="bad_video",
        )
    check_aspect_ratio(width, height, param, what="frames of ", code="bad_video")
    kept_height, kept_width = limits.frames.kept_size(count, height, width)
    check_aspect_ratio(kept_width, kept_height, param, what="frames that are scaled to ", code="bad_video")


def _check_file_frames(frames: int, file: _File) -> None:
    if frames > file.limits.max_file_frames:
        raise BadRequest(
            f"{file.param} has more than {file.limits.max_file_frames} frames, which are {MAX_FILE_FPS} for each of "
            f"the {file.limits.max_s:g} s that are accepted.",
            param=file.param,
            code="too_many_frames",
            status=413,
        )


def _check_duration(duration_s: float | Fraction, file: _File) -> None:
    if duration_s > file.limits.max_s:
        raise lasts_too_long("video", file.limits.max_s, file.param)


def _changing_size(size: tuple[int, int], other: tuple[int, int], param: str) -> BadRequest:
    return BadRequest(
        f"{param} has frames of {size[0]} x {size[1]} and of {other[0]} x {other[1]} pixels; send frames of one size.",
        param=param,
        code="bad_video",
    )


def _unsupported_codec(kind: str, accepted: str, param: str) -> BadRequest:
    return BadRequest(
        f"{param} has {kind} of a codec that is not accepted; send {accepted}.",
        param=param,
        code="unsupported_video",
        status=415,
    )


def _no_sound(param: str) -> BadRequest:
    return BadRequest(f"{param} has no sound track; leave use_audio_in_video out.", param=param, code="no_sound_track")


def _unreadable(param: str) -> BadRequest:
    return BadRequest(
        f"{param} cannot be read as a video; send a whole mp4, mov, webm or matroska file.",
        param=param,
        code="bad_video",
    )
