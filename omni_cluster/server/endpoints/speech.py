"""`/v1/audio/speech`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI, Request
from starlette.responses import Response

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.access import FINISH_HEADER, IGNORED_HEADER
from omni_cluster.openai_api.encoding import MEDIA_TYPES
from omni_cluster.openai_api.speech import SpeechBody, SpeechRequest, delta_event, done_event
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import finish_reason, voice_header, whole_sound
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.server.sound_file import coded
from omni_cluster.server.streamed import AnswerStream, open_stream, whole_output
from omni_cluster.types.inputs import OmniRequest


class SpeechEndpoint:
    """Reads a text aloud, whole or as it is made; sound is coded by threads."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        add_post(
            api,
            "/v1/audio/speech",
            self.speech,
            body=openapi.request_body(SpeechBody, self._its.bound.config.models),
            gives=(*MEDIA_TYPES.values(), "text/event-stream"),
            prompt="input",
            name="speech",
        )

    async def speech(self, http_request: Request, admitted: AdmittedRequest) -> Response:
        admitted.allowance.check_sound()
        build = functools.partial(self._built, http_request.state.request_id)
        spoken, request = await self._its.reader.speech(http_request, build)
        answered = self._whole if spoken.stream_format is None else self._streamed
        return await answered(spoken, request, admitted)

    async def _whole(self, spoken: SpeechRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        output = await whole_output(self._its.pipeline, request, admitted)
        sound = await asyncio.to_thread(whole_sound, output.audio, spoken.format, spoken.sample_rate_hz)
        headers = self._headers(spoken) | {FINISH_HEADER: finish_reason(output)}
        return Response(sound, media_type=MEDIA_TYPES[spoken.format], headers=headers)

    async def _streamed(self, spoken: SpeechRequest, request: OmniRequest, admitted: AdmittedRequest) -> Response:
        answer = await open_stream(self._its.pipeline, request, admitted, answer_progress(self._its.bound))
        sound = spoken_sound(spoken, answer, self._its.coding)
        media_type = MEDIA_TYPES[spoken.format] if spoken.stream_format == "audio" else None
        return sse.EventStream(sound, self._headers(spoken), media_type)

    def _headers(self, spoken: SpeechRequest) -> dict[str, str]:
        """The voice, and what of the request the model does as it will."""
        ignored = {IGNORED_HEADER: ", ".join(spoken.ignored)} if spoken.ignored else {}
        return voice_header(self._its.bound.family.check_voice(spoken.voice)) | ignored

    def _built(self, request_id: str, spoken: SpeechRequest) -> tuple[SpeechRequest, OmniRequest]:
        return spoken, self._its.builder.of_speech(spoken, request_id)


async def spoken_sound(
    spoken: SpeechRequest, answer: AnswerStream[AnswerProgress], threads: ThreadPoolExecutor
) -> AsyncIterator[bytes]:
    """The body of the answer: raw bytes of one file, or server-sent events with its pieces; coded in `threads`.

    What breaks after the first byte is an event; raw bytes just end, which cuts the connection off.
    """
    as_events = spoken.stream_format == "sse"
    try:
        async with contextlib.aclosing(coded(spoken, answer, threads)) as pieces:
            async for piece in pieces:
                yield sse.event(delta_event(piece)) if as_events else piece
        if as_events:
            counts = answer.progress.counts
            yield sse.event(done_event(counts.text, counts.codec, finish_reason(answer.progress)))
    except Exception as error:  # the boundary to the client, after the first byte
        last = sse.event(error_answer(error, "input")[1])  # logs it, too
        if not as_events:
            raise
        yield last
