"""`/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omni_cluster.engine.answer import AnswerBuilder
from omni_cluster.engine.pipeline import answer_builder
from omni_cluster.models.family import Hearing
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.access import FINISH_HEADER
from omni_cluster.openai_api.errors import blamed_on
from omni_cluster.openai_api.multipart import FILE
from omni_cluster.openai_api.transcript import delta_event, done_event, ending, plain_transcript, transcript
from omni_cluster.openai_api.transcription import Task, TranscriptionRequest, transcription_body
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import text_sampling
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import AnswerStream, open_stream, whole_output
from omni_cluster.types.inputs import Media, OmniRequest


class TranscriptionsEndpoint:
    """Writes down what is said in a sound, as it is spoken or translated, whole or as it is made."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        self._add(api, "/v1/audio/transcriptions", "transcribe")
        self._add(api, "/v1/audio/translations", "translate")

    def _add(self, api: FastAPI, path: str, task: Task) -> None:
        add_post(
            api,
            path,
            functools.partial(self.heard, task),
            body=transcription_body(task, self._its.bound.config.models),
            gives=("application/json", "text/plain", "text/event-stream"),
            prompt=FILE,
            name=task,
        )

    async def heard(self, task: Task, http_request: Request, admitted: AdmittedRequest) -> Response:
        asked = await self._its.reader.transcription(http_request, task)
        request_id = http_request.state.request_id
        request = await self._its.reader.off_loop(functools.partial(self._omni_request, asked, request_id))
        asked = asked.without_sound()  # nothing here listens to it again
        answered = self._streamed if asked.stream else self._whole
        return await answered(asked, request, admitted)

    def _omni_request(self, asked: TranscriptionRequest, request_id: str) -> OmniRequest:
        with blamed_on("prompt"):
            prompt = self._its.bound.family.hearing(Hearing(asked.language, asked.into, asked.hint))
        seeded = {} if asked.seed is None else {"seed": asked.seed}
        draft = OmniRequest(
            request_id=request_id,
            prompt=prompt,
            media=Media(audios=(asked.samples,)),
            wants_audio=False,
            sampling=text_sampling(asked.sampling | seeded, self._its.bound.config),
            adapter=self._its.bound.adapter_of(asked.model),
        )
        return self._its.builder.build(draft, asked.seed)

    async def _whole(self, asked: TranscriptionRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        output = await whole_output(self._its.pipeline, request, admitted)
        if asked.format in ("json", "verbose_json"):
            return await asyncio.to_thread(lambda: JSONResponse(transcript(asked, output)))
        text = plain_transcript(asked, output.text)
        return PlainTextResponse(text, headers={FINISH_HEADER: ending(output)})

    async def _streamed(self, asked: TranscriptionRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        whole = answer_builder(request.request_id, self._its.bound)  # the last event has the whole text
        body = self._sse(asked, await open_stream(self._its.pipeline, request, admitted, whole))
        return sse.EventStream(body)

    async def _sse(self, asked: TranscriptionRequest, answer: AnswerStream[AnswerBuilder]) -> AsyncIterator[bytes]:
        try:
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    if chunk.text or chunk.choices:
                        yield sse.event(delta_event(chunk.text, chunk.choices, asked.tells_logprobs))
            yield sse.event(done_event(asked, answer.progress.finish()))
        except Exception as error:  # the boundary to the client, after the first byte
            yield sse.event(error_answer(error, FILE)[1])
