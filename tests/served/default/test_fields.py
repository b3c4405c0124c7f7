"""Sampling and videos on a cluster: one of each kind of which `tests/server` has all."""

from __future__ import annotations

import pytest

from tests.reference import Reference
from tests.served.app import ServedApp
from tests.server.expected import assert_answered_as_by_the_reference
from tests.server.neighbours import LONG, assert_same_beside_others


def test_a_seeded_answer_is_the_same_alone_and_beside_others(served: ServedApp) -> None:
    assert_same_beside_others(served, LONG, {"top_k": 30, "repetition_penalty": 1.2})


@pytest.mark.full
def test_a_video_of_pictures_is_answered_as_by_the_reference(served: ServedApp, reference: Reference) -> None:
    assert_answered_as_by_the_reference(served, reference, "video", stream=True)
