"""How paths are added to the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from omni_cluster.openai_api import openapi
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.refusals import error_answer, refusal

Answer = Callable[[Request, AdmittedRequest], Awaitable[Response]]


def add_get(api: FastAPI, path: str, answer: Callable[..., Any], **options: Any) -> None:
    """GET, and HEAD, which is answered as GET; the HTTP server sends no body then. The schema has GET alone."""
    api.add_api_route(path, answer, methods=["GET"], **options)
    api.add_api_route(path, answer, methods=["HEAD"], **(options | {"include_in_schema": False}))


def add_post(
    api: FastAPI, path: str, answer: Answer, *, body: dict[str, Any], gives: Sequence[str], prompt: str, name: str
) -> None:
    """POST, whose body `answer` reads itself; FastAPI's documentation gets what it takes and gives.

    `body`: see `openapi`. `gives`: media types of answers. `prompt`: the field that has the prompt, which a refusal of
    the prompt names. `name`: of the operation.
    """

    async def answered(http_request: Request) -> Response:
        admitted: AdmittedRequest = http_request.state.admitted
        try:
            async with admitted.in_time():
                return await answer(http_request, admitted)
        except Exception as error:  # the boundary to the client: every error becomes an answer
            return refusal(*error_answer(error, prompt), error)

    options: dict[str, Any] = {"response_model": None, "responses": openapi.answers(*gives), "openapi_extra": body}
    api.add_api_route(path, answered, methods=["POST"], name=name, **options)
