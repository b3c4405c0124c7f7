"""Decoded media of a request, as they go from the decoder to the stage that hears and sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from PIL.Image import Image, fromarray


@dataclass(frozen=True, slots=True)
class FramePolicy:
    """Which frames of a video a model is shown, and how large they are kept. Its numbers are those of a model.

    `together`: frames that the model takes together; a video has a multiple of them. `least`: frames of a video at
    least. `kept_pixels`: pixels of all frames up to which they are kept as decoded. Above it a larger frame than the
    model needs is scaled to sides that are multiples of `patch`: `max_pixels` of a frame, and `total_pixels` of all,
    but never below `min_pixels` of a frame.
    """

    together: int = 1
    least: int = 1
    kept_pixels: int = 1 << 62
    patch: int = 1
    min_pixels: int = 1
    max_pixels: int = 1 << 62
    total_pixels: int = 1 << 62

    def whole(self, number: float) -> int:
        """The largest number of frames that the model takes, not above `number`."""
        return math.floor(number / self.together) * self.together

    def filled(self, count: int) -> int:
        """The least number of frames that the model takes, not below `count`."""
        return -(-count // self.together) * self.together

    def count(self, total: int, file_fps: float, fps: float, max_frames: int) -> int:
        """Frames to show of a file's `total`, for `fps` a second; `together` for a file of fewer."""
        most = self.whole(min(max_frames, total))
        wanted = min(max(total / file_fps * fps, self.least), most, total)
        return max(self.whole(wanted), self.together)

    def count_of(self, number: int, total: int, max_frames: int) -> int:
        """Frames to show of a file's `total` where a client says the `number` of them."""
        return max(self.whole(min(number, max_frames, total)), self.together)

    def kept_size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of `count` frames as they are kept."""
        share = self.total_pixels * self.together // count
        max_pixels = max(min(self.max_pixels, share), self.min_pixels)
        if count * height * width <= self.kept_pixels or height * width <= max_pixels:
            return height, width
        rounded = round(height / self.patch) * self.patch, round(width / self.patch) * self.patch
        if rounded[0] * rounded[1] <= max_pixels:
            return max(self.patch, rounded[0]), max(self.patch, rounded[1])
        shrink = math.sqrt(height * width / max_pixels)
        return self._floored(height / shrink), self._floored(width / shrink)

    def _floored(self, length: float) -> int:
        return max(self.patch, math.floor(length / self.patch) * self.patch)


ALL_FRAMES = FramePolicy()
"""As they are decoded."""


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames of a video, uint8 RGB `[T, H, W, 3]`, `fps` of them a second; T as the model's `FramePolicy` has it.

    `audio`: what is heard with them, float32 mono at 16 kHz, `[samples]`; None where only the frames count.
    """

    frames: np.ndarray
    fps: float
    audio: np.ndarray | None = None

    @property
    def size_bytes(self) -> int:
        return self.frames.nbytes + (0 if self.audio is None else self.audio.nbytes)


@dataclass(frozen=True, slots=True)
class Media:
    """Decoded media of one request, in the order of their places in the prompt.

    `audios`: float32 mono at 16 kHz, each `[samples]`; `images`: RGB, as pictures or as uint8 `[H, W, 3]`.
    """

    audios: tuple[np.ndarray, ...] = ()
    images: tuple[Image | np.ndarray, ...] = ()
    videos: tuple[Video, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all samples and pixels."""
        sounds = sum(audio.nbytes for audio in self.audios)
        pictures = sum(map(_picture_bytes, self.images))
        return sounds + pictures + sum(video.size_bytes for video in self.videos)

    def as_arrays(self) -> Media:
        """The same in plain arrays, RGB pictures as `[H, W, 3]` among them: what can be mapped where it lies."""
        return replace(self, images=tuple(map(_as_array, self.images)))

    def as_images(self) -> Media:
        """What `as_arrays` was called of, to the bit."""
        images = (fromarray(image) if isinstance(image, np.ndarray) else image for image in self.images)
        return replace(self, images=tuple(images))


def _as_array(image: Image | np.ndarray) -> Image | np.ndarray:
    return np.asarray(image) if isinstance(image, Image) and image.mode == "RGB" else image


def _picture_bytes(picture: Image | np.ndarray) -> int:
    if isinstance(picture, np.ndarray):
        return picture.nbytes
    bytes_a_value = 1 if picture.mode in ("L", "P", "RGB", "RGBA") else 4
    return picture.width * picture.height * len(picture.getbands()) * bytes_a_value
