from __future__ import annotations

import pytest

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.paths import Paths


@pytest.fixture
def paths() -> Paths:
    made = Paths()
    for path, own in (("messages", "input"), ("messages[1]", "input[0]"), ("messages[1].content", "input[0].output")):
        made.note(path, own)
    return made


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("messages", "input"),
        ("messages[1]", "input[0]"),
        ("messages[1].role", "input[0].role"),
        ("messages[1].content[2].text", "input[0].output[2].text"),
        ("messages[1].contents", "input[0].contents"),
        ("messages[12].role", "input[12].role"),
        ("model", "model"),
    ],
)
def test_a_path_is_the_client_s_own_as_far_as_one_is_known(paths: Paths, path: str, own: str) -> None:
    assert paths.own(path) == own


def test_a_refusal_keeps_all_but_its_path(paths: Paths) -> None:
    with pytest.raises(BadRequest) as caught, paths.translated():
        raise BadRequest("messages[1].role is bad.", param="messages[1].role", code="c", status=429, retry_after_s=3)
    error = caught.value
    assert (error.message, error.param) == ("input[0].role is bad.", "input[0].role")
    assert (error.code, error.status, error.retry_after_s) == ("c", 429, 3)


def test_a_refusal_without_a_path_is_left_alone(paths: Paths) -> None:
    with pytest.raises(BadRequest, match=r"^messages are many\.$"), paths.translated():
        raise BadRequest("messages are many.")
