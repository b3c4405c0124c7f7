"""Pictures of the small world: one shape of one colour on a pale or dark ground."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from PIL import Image, ImageDraw

from training.world import Picture

Point = tuple[float, float]

SIDE: Final = 112
_FINER: Final = 3
"""Drawn so many times larger, and made smaller: edges are smooth."""
RGB: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (215, 25, 30),
    "green": (30, 150, 50),
    "blue": (25, 70, 215),
    "yellow": (245, 225, 30),
    "orange": (250, 135, 15),
    "purple": (125, 35, 165),
    "pink": (250, 140, 190),
    "brown": (115, 65, 25),
}
GROUNDS: Final = ((255, 255, 255), (235, 235, 230), (200, 205, 210), (30, 30, 34), (0, 0, 0))
_SHADE: Final = 12
"""How far each channel of a colour may lie from `RGB`."""


def draw(picture: Picture, side: int = SIDE) -> Image.Image:
    """In RGB; the same for the same picture."""
    rng = Random(picture.seed)
    width = side * _FINER
    image = Image.new("RGB", (width, width), rng.choice(GROUNDS))
    radius = width * rng.uniform(0.16, 0.4)
    centre = (rng.uniform(radius, width - radius), rng.uniform(radius, width - radius))
    colour = _shaded(RGB[picture.colour], rng)
    turn = rng.uniform(0, 2 * math.pi)
    SHAPES[picture.shape](ImageDraw.Draw(image), centre, radius, turn, colour)
    return image.resize((side, side), Image.Resampling.BOX)


def _shaded(colour: tuple[int, int, int], rng: Random) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, channel + rng.randint(-_SHADE, _SHADE))) for channel in colour)
    return red, green, blue


Colour = tuple[int, int, int]


def _disc(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
    pen.ellipse(_box(centre, radius), fill=colour)


def _ring(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
    pen.ellipse(_box(centre, radius), outline=colour, width=round(radius * 0.35))


def _box(centre: Point, radius: float) -> tuple[float, float, float, float]:
    return centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius


def _polygon(corners: int, radii: tuple[float, ...] = (1.0,)) -> Callable[..., None]:
    """Of that many corners around the centre; `radii` are theirs in turn."""

    def draw_it(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
        pen.polygon([
            _around(centre, radius * radii[corner % len(radii)], turn + 2 * math.pi * corner / corners)
            for corner in range(corners)
        ], fill=colour)  # fmt: skip

    return draw_it


def _around(centre: Point, radius: float, angle: float) -> Point:
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


def _cross(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
    for arm in (turn, turn + math.pi / 2):
        ends = [_around(centre, radius * side, arm) for side in (-1, 1)]
        pen.line(ends, fill=colour, width=round(radius * 0.5))


SHAPES: Final[Mapping[str, Callable[..., None]]] = {
    "circle": _disc,
    "square": _polygon(4),
    "triangle": _polygon(3),
    "star": _polygon(10, (1.0, 0.42)),
    "cross": _cross,
    "ring": _ring,
}
