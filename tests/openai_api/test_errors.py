from __future__ import annotations

import pytest

from omni_cluster.errors import OmniError, RequestError
from omni_cluster.openai_api.errors import BadRequest, error_body


def test_a_refusal_is_one_of_our_errors_and_carries_its_fields() -> None:
    error = BadRequest("seed is wrong.", param="seed", code="invalid_value")
    assert isinstance(error, RequestError) and isinstance(error, OmniError)
    assert str(error) == error.message == "seed is wrong."
    assert error.status == 400


def test_the_body_has_the_shape_of_openai() -> None:
    assert BadRequest("no such model.", param="model", code="model_not_found", status=404).body() == {
        "error": {
            "message": "no such model.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "invalid_request_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert error_body("x", status=status)["error"] == {"message": "x", "type": kind, "param": None, "code": None}
