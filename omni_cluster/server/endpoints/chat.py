"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.chat import ChatBody, ChatRequest
from omni_cluster.openai_api.completion import ChatStream, Spoken, Usage, completion, sum_of
from omni_cluster.openai_api.structured import structure_named
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import (
    StreamedSound,
    finish_reason,
    timings,
    usage,
    voice_header,
    whole_sound,
)
from omni_cluster.server.off_loop import OffLoop
from omni_cluster.server.quotas import Allowance
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import AnswerStream, closing_all, gathered, merged, open_streams, whole_output
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from omni_cluster.types.sampling import BOUNDS


class ChatEndpoint:
    """Renders prompts, and turns what the stages say into OpenAI's shapes; sound is coded by threads."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        add_post(
            api,
            "/v1/chat/completions",
            self.chat_completions,
            body=openapi.request_body(ChatBody, self._its.bound.config.models),
            gives=("application/json", "text/event-stream"),
            prompt="messages",
            name="chat_completions",
        )

    async def chat_completions(self, http_request: Request, admitted: AdmittedRequest) -> Response:
        build = functools.partial(self._built, http_request.state.request_id, admitted.allowance)
        chat, requests = await self._its.reader.chat(http_request, build)
        answered = self._streamed if chat.stream else self._whole
        with structure_named(chat.structure if chat.tool_use is None else None):
            return await answered(chat, requests, admitted)

    def _built(
        self, request_id: str, allowance: Allowance, chat: ChatRequest
    ) -> tuple[ChatRequest, Sequence[OmniRequest]]:
        """The chat, whose media nothing here looks at again, and a request of each choice."""
        if chat.wants_audio:
            allowance.check_sound()
        return chat.without_media(), choices_of(self._its.builder.of_chat(chat, request_id), chat.choices)

    async def _whole(self, chat: ChatRequest, requests: Sequence[OmniRequest], admitted: AdmittedRequest) -> Response:
        outputs = await gathered([whole_output(self._its.pipeline, request, admitted) for request in requests])
        return await asyncio.to_thread(self._completed, chat, outputs)

    def _completed(self, chat: ChatRequest, outputs: Sequence[OmniRequestOutput]) -> Response:
        """The sound of a minute takes seconds to code, and is megabytes of JSON."""
        voice = self._voice(chat)
        body = completion(
            chat, [_spoken(chat, output, self._its.bound.sample_rate_hz) for output in outputs], voice=voice
        )
        return JSONResponse(body | {"omni": timings(outputs[0])}, headers=voice_header(voice))

    def _voice(self, chat: ChatRequest) -> str | None:
        """In which an answer is spoken; None for one that is not."""
        return self._its.bound.family.check_voice(chat.voice) if chat.wants_audio else None

    async def _streamed(
        self, chat: ChatRequest, requests: Sequence[OmniRequest], admitted: AdmittedRequest
    ) -> Response:
        answers = await open_streams(self._its.pipeline, requests, admitted)
        return sse.EventStream(self._sse(chat, answers), voice_header(self._voice(chat)))

    async def _sse(self, chat: ChatRequest, answers: Sequence[AnswerStream[AnswerProgress]]) -> AsyncIterator[bytes]:
        used = functools.partial(_used, [answer.progress for answer in answers])
        head = ChatStream(chat)
        streams = [
            ChatStream(chat, answer_id=head.id, created=head.created, index=i, voice=self._voice(chat), used=used)
            for i in range(len(answers))
        ]
        said = [self._choice(chat, stream, answer) for stream, answer in zip(streams, answers, strict=True)]
        try:
            async with closing_all(answers), contextlib.aclosing(merged(said)) as events:
                async for event in events:
                    yield event
            if (last := head.usage(used())) is not None:
                yield sse.event(last)
            yield sse.DONE
        except Exception as error:  # the boundary to the client, after the first byte
            yield sse.event(error_answer(error)[1])

    async def _choice(
        self, chat: ChatRequest, stream: ChatStream, answer: AnswerStream[AnswerProgress]
    ) -> AsyncGenerator[bytes, None]:
        """The events of one choice."""
        sound = StreamedSound(chat.audio_format)
        off_loop = OffLoop(self._its.coding, sound.close)
        try:
            async with contextlib.aclosing(answer):
                yield sse.event(stream.start())
                async for chunk in answer:
                    if chunk.text or chunk.choices:
                        yield sse.event(stream.text(chunk.text, chunk.choices))
                    if chunk.calls:
                        yield sse.event(stream.calls(chunk.calls))
                    for image in chunk.images:
                        yield await off_loop.run(functools.partial(_image_event, stream, image.png))
                    if (audio := chunk.audio) is not None:
                        said = functools.partial(_sound_event, stream, functools.partial(sound.push, audio))
                        if piece := said() if sound.is_quick(audio) else await off_loop.run(said):
                            yield piece
            if rest := await off_loop.run(functools.partial(_sound_event, stream, sound.flush)):
                yield rest
            yield sse.event(stream.finish(finish_reason(answer.progress)) | {"omni": timings(answer.progress)})
        finally:
            off_loop.close()


def choices_of(request: OmniRequest, count: int) -> list[OmniRequest]:
    """The request, and further ones that differ from it, and from each other, in their seeds."""
    return [request, *(_seeded_anew(request, number) for number in range(1, count))]


def _seeded_anew(request: OmniRequest, number: int) -> OmniRequest:
    sampling = {
        stage: {**asked, "seed": _moved(asked["seed"], number)} if asked.get("seed") is not None else asked
        for stage, asked in request.sampling.items()
    }
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        seed=_moved(request.seed, number),
        sampling=sampling,
    )


def _moved(seed: int, number: int) -> int:
    """Another seed within the bounds."""
    moved = seed + number
    return moved if BOUNDS["seed"].hold(moved) else moved - 2**64


def _used(answers: Sequence[AnswerProgress]) -> Usage:
    return sum_of([usage(answer) for answer in answers])


def _spoken(chat: ChatRequest, output: OmniRequestOutput, sample_rate_hz: int) -> Spoken:
    return Spoken(
        text=output.text,
        finish_reason=finish_reason(output),
        usage=usage(output),
        audio=whole_sound(output.audio, chat.audio_format or "wav", sample_rate_hz) if chat.wants_audio else None,
        choices=output.choices,
        calls=output.calls,
        images=output.images,
    )


def _image_event(stream: ChatStream, png: bytes) -> bytes:
    """Its JSON takes milliseconds a megabyte."""
    return sse.event(stream.image(png))


def _sound_event(stream: ChatStream, made: Callable[[], bytes]) -> bytes:
    """The event of a piece of sound; no bytes where none may be sent yet."""
    piece = made()
    return sse.event(stream.audio(piece)) if piece else b""
