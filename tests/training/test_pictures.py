"""Pictures have one shape of the colour that they say, wherever it lies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from training import words
from training.pictures import GROUNDS, RGB, draw
from training.world import Picture

PAIRS = list(itertools.product(words.COLOURS, words.SHAPES))
FILLED = {"circle": 3.14, "square": 2.0, "triangle": 1.3, "star": 1.2, "cross": 1.75, "ring": 1.81}
"""Areas, of a shape whose corners lie at 1 from its centre."""


def test_a_picture_is_the_same_whenever_it_is_drawn() -> None:
    one, again, other = (draw(Picture("red", "star", seed)) for seed in (1, 1, 2))
    assert one.tobytes() == again.tobytes() != other.tobytes()
    assert (one.mode, one.size) == ("RGB", (112, 112))


@pytest.mark.parametrize(("colour", "shape"), PAIRS, ids=" ".join)
def test_the_shape_is_whole_and_nearest_to_its_colour(colour: str, shape: str) -> None:
    for seed in range(5):
        drawn = np.asarray(draw(Picture(colour, shape, seed)), np.int32)
        ground = min(GROUNDS, key=lambda each: -(drawn == each).all(-1).sum())
        inside = np.abs(drawn - ground).sum(-1) > 40
        rim = np.concatenate([inside[0], inside[-1], inside[:, 0], inside[:, -1]])
        assert rim.mean() < 0.1
        assert 0.01 < inside.mean() < 0.55
        middle = np.median(drawn[inside], axis=0)
        assert min(RGB, key=lambda name: np.abs(np.subtract(RGB[name], middle)).sum()) == colour


def test_shapes_differ_in_how_much_of_their_circle_they_fill() -> None:
    areas = {}
    for shape in words.SHAPES:
        drawn = np.asarray(draw(Picture("blue", shape, 3)), np.int32)
        areas[shape] = (np.abs(drawn - drawn[0, 0]).sum(-1) > 40).sum()
    for shape, area in areas.items():
        assert area / areas["circle"] == pytest.approx(FILLED[shape] / FILLED["circle"], rel=0.1)
