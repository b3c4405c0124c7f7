"""Whether a host may get requests, by what its pipeline says of the stages' replicas."""

from __future__ import annotations

from typing import Any

import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from tests.configs import TINY_CONFIG
from tests.server.speaker import face_of

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.mark.parametrize(
    ("living", "status", "more"),
    [
        ({"thinker": 2, "talker": 1}, 200, {}),
        ({"thinker": 1, "talker": 0}, 200, {"asleep": ["talker"]}),
        ({"thinker": 0, "talker": 1}, 503, {}),
        ({"thinker": 0, "talker": 0}, 503, {"asleep": ["talker"]}),
    ],
)
async def test_a_stage_that_may_sleep_needs_no_replica_and_any_other_does(
    living: dict[str, int], status: int, more: dict[str, Any]
) -> None:
    async with face_of(load_config(TINY_CONFIG, known_families=known_families())) as face:
        face.speaker.living, face.speaker.sleepers = living, frozenset({"talker"})
        answer = await face.client.get("/ready")
    assert (answer.status_code, answer.json()) == (status, {"ready": status == 200, "replicas": living, **more})
