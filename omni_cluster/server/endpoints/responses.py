"""`/v1/responses`: a chat in OpenAI's newer words. Nothing of an answer is kept."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.response_answer import Event, ResponseAnswer
from omni_cluster.openai_api.responses import ResponsesBody, ResponsesRequest
from omni_cluster.openai_api.structured import structure_named
from omni_cluster.openai_api.wire import shown
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import finish_reason, timings, usage
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import AnswerStream, open_stream, whole_output
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput

_PROMPT = "input"
"""The field that has the prompt."""


class ResponsesEndpoint:
    """Answers a chat as a response, whole or by its events."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        add_post(
            api,
            "/v1/responses",
            self.responses,
            body=openapi.request_body(ResponsesBody, self._its.bound.config.models),
            gives=("application/json", "text/event-stream"),
            prompt=_PROMPT,
            name="responses",
        )
        for path, methods in (("", ["GET", "DELETE"]), ("/cancel", ["POST"]), ("/input_items", ["GET"])):
            api.add_api_route(
                f"/v1/responses/{{response_id}}{path}", self.kept, methods=methods, include_in_schema=False
            )
        for name in ("compact", "input_tokens"):  # or the answer would say that GET is for them
            api.add_api_route(f"/v1/responses/{name}", self.lacking, methods=["POST"], include_in_schema=False)

    async def kept(self, response_id: str) -> Response:
        """An earlier response: none is kept."""
        sentence = f"The response {shown(response_id)} does not exist: no response is kept once it is answered."
        return JSONResponse(BadRequest(sentence, code="response_not_found").body(), 404)

    async def lacking(self) -> Response:
        """What OpenAI has beside it."""
        raise HTTPException(404)

    async def responses(self, http_request: Request, admitted: AdmittedRequest) -> Response:
        build = functools.partial(self._built, http_request.state.request_id)
        asked, request = await self._its.reader.response(http_request, build)
        answered = self._streamed if asked.chat.stream else self._whole
        with structure_named(asked.chat.structure if asked.chat.tool_use is None else None):
            return await answered(asked, request, admitted)

    def _built(self, request_id: str, asked: ResponsesRequest) -> tuple[ResponsesRequest, OmniRequest]:
        """What is asked for, whose media nothing here looks at again, and its request."""
        return asked.without_media(), self._its.builder.of_chat(asked.chat, request_id, _PROMPT)

    async def _whole(self, asked: ResponsesRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        output = await whole_output(self._its.pipeline, request, admitted)
        return await asyncio.to_thread(_completed, asked, output)

    async def _streamed(self, asked: ResponsesRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        answer = await open_stream(self._its.pipeline, request, admitted, answer_progress(self._its.bound))
        return sse.EventStream(response_events(asked, answer))


def _completed(asked: ResponsesRequest, output: OmniRequestOutput) -> Response:
    """With log-probabilities it is megabytes of JSON."""
    response = ResponseAnswer(asked)
    if output.text or output.choices:
        response.text(output.text, output.choices)
    for call in output.calls:
        response.call(call.id, call.name, call.arguments)
    _end(response, output)
    return JSONResponse(response.body())


def _end(response: ResponseAnswer, answer: OmniRequestOutput | AnswerProgress) -> list[Event]:
    return response.end(finish_reason(answer), usage(answer), omni=timings(answer))


async def response_events(asked: ResponsesRequest, answer: AnswerStream[AnswerProgress]) -> AsyncIterator[bytes]:
    """The body of a streamed response. Its last events say what breaks after the first byte."""
    response = ResponseAnswer(asked)
    try:
        async with contextlib.aclosing(answer):
            yield _sent(response.start())
            async for chunk in answer:
                if chunk.text or chunk.choices:
                    yield _sent(response.text(chunk.text, chunk.choices))
                if chunk.calls:
                    yield _sent(response.calls(chunk.calls))
        yield await asyncio.to_thread(lambda: _sent(_end(response, answer.progress)))
    except Exception as error:  # the boundary to the client, after the first byte
        _, body = error_answer(error, _PROMPT)
        yield _sent(response.fail(body["error"]))


def _sent(events: Sequence[Event]) -> bytes:
    return b"".join(map(sse.named_event, events))
