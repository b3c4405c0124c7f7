from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from omni_cluster.openai_api.errors import BadRequest, blamed_on, error_body, route_refused
from omni_cluster.types.errors import OmniError, RequestError


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


def test_what_is_refused_without_a_field_gets_the_one_that_is_blamed() -> None:
    with pytest.raises(BadRequest) as blamed, blamed_on("input"):
        raise RequestError("the text is too long.")
    assert (blamed.value.message, blamed.value.param) == ("the text is too long.", "input")
    with pytest.raises(BadRequest) as named, blamed_on("input"):
        raise BadRequest("no such voice.", param="voice", status=404)
    assert (named.value.param, named.value.status) == ("voice", 404)
    with pytest.raises(OmniError) as other, blamed_on("input"):
        raise OmniError("no request's fault.")
    assert not isinstance(other.value, BadRequest)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "words"),
    [
        ("GET", "/nowhere", 404, "unknown_url", '"/nowhere" is no path of this API, which has /here.'),
        ("GET", "/" + "x" * 99, 404, "unknown_url", "x" * 59 + '" is no path'),
        ("DELETE", "/here", 405, "method_not_supported", 'DELETE is not for "/here"; use GET.'),
    ],
)
async def test_a_request_that_no_route_takes(method: str, path: str, status: int, code: str, words: str) -> None:
    api = FastAPI(openapi_url=None)
    api.add_exception_handler(HTTPException, route_refused)
    api.add_api_route("/here", lambda: {}, methods=["GET"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://api") as client:
        answer = await client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, None)
    assert words in error["message"]
    assert status != 405 or answer.headers["allow"] == "GET"
