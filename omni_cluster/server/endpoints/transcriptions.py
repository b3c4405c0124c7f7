"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from omni_cluster.engine.answer import AnswerBuilder
from omni_cluster.engine.pipeline import Pipeline, answer_builder
from omni_cluster.models.family import Hearing
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.access import FINISH_HEADER
from omni_cluster.openai_api.errors import blamed_on
from omni_cluster.openai_api.multipart import FILE
from omni_cluster.openai_api.transcript import delta_event, done_event, ending, plain_transcript, transcript
from omni_cluster.openai_api.transcription import Task, TranscriptionRequest, transcription_body
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import text_sampling
from omni_cluster.server.reader import Reader
from omni_cluster.server.refusals import error_answer, refusal
from omni_cluster.server.request_builder import RequestBuilder
from omni_cluster.server.streamed import AnswerStream, open_stream, whole_output
from omni_cluster.types.inputs import Media, OmniRequest


class TranscriptionsEndpoint:
    """Writes down what is said in a sound, as it is spoken or translated, whole or as it is made."""

    def __init__(self, pipeline: Pipeline, reader: Reader, builder: RequestBuilder) -> None:
        self._pipeline = pipeline
        self._bound = pipeline.bound
        self._reader = reader
        self._builder = builder

    def add_to(self, api: FastAPI) -> None:
        """The routes read their bodies themselves; FastAPI's documentation gets what they take and give."""
        self._add(api, "/v1/audio/transcriptions", "transcribe")
        self._add(api, "/v1/audio/translations", "translate")

    def _add(self, api: FastAPI, path: str, task: Task) -> None:
        async def endpoint(http_request: Request) -> Response:
            return await self.heard(http_request, task)

        api.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=task,
            response_model=None,
            responses=openapi.answers("application/json", "text/plain", "text/event-stream"),
            openapi_extra=transcription_body(task, [self._bound.config.model]),
        )

    async def heard(self, http_request: Request, task: Task) -> Response:
        admitted: AdmittedRequest = http_request.state.admitted
        try:
            async with admitted.in_time():
                asked = await self._reader.transcription(http_request, task)
                request_id = http_request.state.request_id
                request = await self._reader.off_loop(functools.partial(self._omni_request, asked, request_id))
                asked = asked.without_sound()  # nothing here listens to it again
                if asked.stream:
                    return await self._streamed(asked, request, admitted)
                return await self._whole(asked, request, admitted)
        except Exception as error:  # the boundary to the client: every error becomes an answer
            return refusal(*error_answer(error, FILE), error)

    def _omni_request(self, asked: TranscriptionRequest, request_id: str) -> OmniRequest:
        with blamed_on("prompt"):
            prompt = self._bound.family.hearing(Hearing(asked.language, asked.into, asked.hint))
        seeded = {} if asked.seed is None else {"seed": asked.seed}
        draft = OmniRequest(
            request_id=request_id,
            prompt=prompt,
            media=Media(audios=(asked.samples,)),
            wants_audio=False,
            sampling=text_sampling(asked.sampling | seeded, self._bound.config),
        )
        return self._builder.build(draft, asked.seed)

    async def _whole(self, asked: TranscriptionRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        output = await whole_output(self._pipeline, request, admitted)
        if asked.format in ("json", "verbose_json"):
            return await asyncio.to_thread(lambda: JSONResponse(transcript(asked, output)))
        text = plain_transcript(asked, output.text)
        return PlainTextResponse(text, headers={FINISH_HEADER: ending(output)})

    async def _streamed(self, asked: TranscriptionRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        whole = answer_builder(request.request_id, self._bound)  # the last event has the whole text
        body = self._sse(asked, await open_stream(self._pipeline, request, admitted, whole))
        return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _sse(self, asked: TranscriptionRequest, answer: AnswerStream[AnswerBuilder]) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    if chunk.text or chunk.choices:
                        yield sse.event(delta_event(chunk.text, chunk.choices, asked.tells_logprobs))
            yield sse.event(done_event(asked, answer.progress.finish()))
        except Exception as error:  # the boundary to the client, after the first byte
            status, body = error_answer(error, FILE)
            yield sse.error_event(body["error"]["message"], status=status, code=body["error"]["code"])
