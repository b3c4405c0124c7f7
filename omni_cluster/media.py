"""Decoded media of a request, as they go from whoever decoded them to the stage that hears and sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames of a video, uint8 RGB `[T, H, W, 3]`, T even, `fps` of them a second.

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


def _picture_bytes(picture: Image | np.ndarray) -> int:
    if isinstance(picture, np.ndarray):
        return picture.nbytes
    bytes_a_value = 1 if picture.mode in ("L", "P", "RGB", "RGBA") else 4
    return picture.width * picture.height * len(picture.getbands()) * bytes_a_value
