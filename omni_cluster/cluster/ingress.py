"""The HTTP face of the cluster: OpenAI's chat API over the orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import RayError, TaskCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_cluster.cluster.orchestrator import Orchestrator, stage_access
from omni_cluster.cluster.parcel import Posted, posted
from omni_cluster.cluster.scrape import Scrape
from omni_cluster.cluster.transport import own_replica_id, running_replicas
from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.answer import Answer
from omni_cluster.engine.build import bind
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.exposition import CONTENT_TYPE, ReplicaMetrics
from omni_cluster.engine.fan_in import StageEvent, chain
from omni_cluster.inputs import Media, OmniRequest
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.access import guarded
from omni_cluster.openai_api.chat import (
    ChatRequest,
    CheckedChat,
    chat_body,
    check_chat_request,
    open_chat_request,
)
from omni_cluster.openai_api.completion import ChatStream, Usage, completion
from omni_cluster.openai_api.decoders import Decoders
from omni_cluster.openai_api.encoding import MEDIA_TYPES
from omni_cluster.openai_api.errors import BadRequest, blamed_on, route_refused
from omni_cluster.openai_api.fetch import Fetcher, TotalBytes
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.speech import SpeechRequest, parse_speech_request, speech_body
from omni_cluster.openai_api.wire import check_model
from omni_cluster.outputs import OmniRequestOutput
from omni_cluster.server.answers import (
    StreamedSound,
    api_keys,
    api_limits,
    decoder_limits,
    error_answer,
    fetch_limits,
    finish_reason,
    stage_sampling,
    timings,
    whole_audio,
    whole_sound,
)
from omni_cluster.server.door import Door, Visit, refusal
from omni_cluster.server.metrics import HttpMeter, IngressMetrics, Metered, heard
from omni_cluster.server.off_loop import OffLoop
from omni_cluster.server.shared import Shared
from omni_cluster.server.spoken import spoken_sound

READY_FRESH_S = 1.0
READY_STALE_S = 5.0
CONTROLLER_WAIT_S = 2.0
SCRAPE_WAIT_S = 10.0
T = TypeVar("T")

SMALL_BODY_BYTES = 65_536
"""What is checked beside other requests, in some milliseconds; more is a decoder's work."""
CHECKING_THREADS = 4
CODING_THREADS = 4
GREETING = [{"role": "user", "content": "Hello"}]


@serve.ingress()
class Ingress:
    """Checks requests, renders prompts, and turns stage chunks into OpenAI's shapes."""

    def __init__(self, config: PipelineConfig, handles: Mapping[str, DeploymentHandle]) -> None:
        self._config = config
        self._bound = bind(config)
        self._orchestrator = Orchestrator(
            self._bound, {name: stage_access(handle, config) for name, handle in handles.items()}
        )
        self._limits = api_limits(config)
        self._fetcher = Fetcher(fetch_limits(config))
        self._decoders = Decoders(decoder_limits(config), self._limits, [config.model], self._bound.family.voices)
        # Of their own: what takes long in one of them keeps nothing in another waiting.
        self._checking = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="checking")
        self._coding = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="coding")
        self._keys = api_keys(config)
        self._door = Door(config.limits, config.ingress_replicas)
        self._metrics = IngressMetrics()
        self._metrics.watch(self._door)
        self._scrape = Scrape(handles, config.ingress_replicas)
        self._scraped = Shared(self._scrape_text, wait_s=SCRAPE_WAIT_S)
        # A thread of its own: those of the requests may all be busy, and Serve's controller may hang.
        self._controller = ThreadPoolExecutor(1, "controller")
        self._running = Shared(
            self._ask_controller, fresh_s=READY_FRESH_S, stale_s=READY_STALE_S, wait_s=CONTROLLER_WAIT_S
        )
        self._created = int(time.time())
        self._bound.family.render(GREETING)  # loads what it needs, or the first request would wait for that

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve asks for it once this object is made: the keys are read here, and never travel through Ray."""
        api = FastAPI(title="omni_cluster", docs_url=None, redoc_url=None)
        api.add_exception_handler(HTTPException, route_refused)
        api.add_api_route("/health", self.health, methods=["GET"])
        api.add_api_route("/ready", self.ready, methods=["GET"])
        api.add_api_route("/metrics", self.metrics_text, methods=["GET"], response_class=PlainTextResponse)
        api.add_api_route("/v1/models", self.models, methods=["GET"])
        api.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_model=None)
        api.add_api_route("/v1/audio/voices", self.voices, methods=["GET"])
        self._add_answers(api)
        # Serve's proxy adds the request's id to every answer.
        app = guarded(self._door.before(api), keys=self._keys, origins=self._config.api.cors_origins, answers_id=False)
        return until_client_leaves(
            Metered(app, self._metrics, [route.path for route in api.routes if isinstance(route, Route)])
        )

    def _add_answers(self, api: FastAPI) -> None:
        """The routes that read their bodies themselves: FastAPI's documentation is told what they take and give."""
        models = [self._config.model]
        api.add_api_route(
            "/v1/chat/completions",
            self.chat_completions,
            methods=["POST"],
            response_model=None,
            responses=openapi.answers("application/json", "text/event-stream"),
            openapi_extra=chat_body(models),
        )
        api.add_api_route(
            "/v1/audio/speech",
            self.speech,
            methods=["POST"],
            response_model=None,
            responses=openapi.answers(*MEDIA_TYPES.values(), "text/event-stream"),
            openapi_extra=speech_body(models),
        )

    async def health(self) -> Response:
        """This process lives."""
        return Response(status_code=200)

    async def ready(self) -> Response:
        """200 when every stage has a replica that answers, 503 with those that have none, or if nobody knows."""
        try:
            running = await self._running.get()
        except (TimeoutError, RayError):
            reason = f"Ray Serve's controller has not answered for {READY_STALE_S:g} s."
            return JSONResponse({"ready": False, "reason": reason}, 503)
        stages = {stage.model_stage: running.get(stage.model_stage, 0) for stage in self._config.stages}
        is_ready = all(stages.values())
        return JSONResponse({"ready": is_ready, "replicas": stages}, 200 if is_ready else 503)

    async def _ask_controller(self) -> dict[str, int]:
        return await asyncio.get_running_loop().run_in_executor(self._controller, running_replicas)

    async def metrics_text(self) -> Response:
        """The whole application's metrics for Prometheus, whichever ingress is asked."""
        return Response(await self._scraped.get(), media_type=CONTENT_TYPE)

    async def _scrape_text(self) -> bytes:
        return await self._scrape.text(await self.metrics())

    async def metrics(self) -> ReplicaMetrics:
        """What this ingress counted so far, for whichever of them is asked."""
        return ReplicaMetrics.of(self._metrics.registry, own_replica_id())

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Response:
        try:
            check_model(name, [self._config.model])
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        model = {"id": self._config.model, "object": "model", "created": self._created, "owned_by": "omni_cluster"}
        return model | {"voices": list(self._bound.family.voices)}

    async def voices(self) -> dict[str, Any]:
        """The default voice first."""
        return {"voices": list(self._bound.family.voices)}

    async def chat_completions(self, http_request: Request) -> Response:
        visit: Visit = http_request.state.visit
        try:
            async with visit.in_time():
                chat = await self._read(http_request)
                request_id = http_request.state.request_id
                request = await posted(await self._checked(lambda: self._omni_request(chat, request_id)))
                told = chat.without_media()  # they lie in the object store now, and nothing here looks at them again
                if told.stream:
                    return await self._streamed(told, request, visit.deadline, http_request.state.meter)
                return await self._whole(told, request, visit.deadline)
        except Exception as error:  # the boundary to the client: every error becomes an answer
            return refusal(*error_answer(error))

    async def speech(self, http_request: Request) -> Response:
        visit: Visit = http_request.state.visit
        try:
            async with visit.in_time():
                body = await visit.body(http_request, min(SMALL_BODY_BYTES, self._limits.max_body_bytes))
                spoken = await self._checked(lambda: self._parse_speech(body))
                request_id = http_request.state.request_id
                request = await posted(await self._checked(lambda: self._reading(spoken, request_id)))
                if spoken.stream_format is None:
                    return await self._spoken_whole(spoken, request, visit.deadline)
                return await self._spoken(spoken, request, visit.deadline, http_request.state.meter)
        except Exception as error:  # the boundary to the client: every error becomes an answer
            return refusal(*error_answer(error, "input"))

    async def _spoken_whole(self, spoken: SpeechRequest, request: Posted, deadline: Deadline) -> Response:
        output = await self._answered(request, deadline)
        sound = await asyncio.to_thread(whole_sound, output.audio, spoken.format)
        return Response(sound, media_type=MEDIA_TYPES[spoken.format])

    async def _spoken(self, spoken: SpeechRequest, request: Posted, deadline: Deadline, meter: HttpMeter) -> Response:
        """Answers once the first chunk is there, so that what fails before it has an HTTP status of its own."""
        events = heard(self._orchestrator.stream(request, deadline), meter)
        told = chain(await anext(events), events)
        sound = spoken_sound(spoken, self._answer(request), told, self._coding)
        media_type = "text/event-stream" if spoken.stream_format == "sse" else MEDIA_TYPES[spoken.format]
        return StreamingResponse(sound, media_type=media_type, headers={"Cache-Control": "no-cache"})

    def _parse_speech(self, body: bytes | bytearray) -> SpeechRequest:
        return parse_speech_request(body, models=[self._config.model], voices=self._bound.family.voices)

    def _reading(self, spoken: SpeechRequest, request_id: str) -> OmniRequest:
        with blamed_on("input"):
            prompt = self._bound.family.reading(spoken.text)
        return OmniRequest(
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt=prompt,
            voice=spoken.voice,
            sampling={} if spoken.seed is None else self._seeded(spoken.seed),
            seed=spoken.seed if spoken.seed is not None else random.getrandbits(31),
            streams_audio=spoken.stream_format is not None,
            reply=spoken.text,
        )

    def _seeded(self, seed: int) -> dict[str, dict[str, Any]]:
        return {stage.model_stage: {"seed": seed} for stage in self._config.stages if stage.diffusion is None}

    async def answer(self, request: OmniRequest) -> OmniRequestOutput:
        """The whole answer to a request, for callers inside the cluster: tokens and samples as they are."""
        deadline = Deadline(self._config.limits.request_timeout_s)
        async with deadline.kept(), self._door.places.one():
            return await self._answered(await posted(request), deadline)

    async def _answered(self, request: Posted, deadline: Deadline) -> OmniRequestOutput:
        answer = self._answer(request)
        async with contextlib.aclosing(self._orchestrator.stream(request, deadline)) as events:
            async for event in events:
                answer.add(event.stage, event.chunk)
        return answer.finish()

    async def _read(self, http_request: Request) -> ChatRequest:
        """Raises BadRequest; all that can be refused without the media is refused before any is fetched."""
        visit: Visit = http_request.state.visit
        body = await visit.body(http_request, self._limits.max_body_bytes)
        # A large one would keep the interpreter, and with it every other request, for its checks alone.
        if len(body) <= SMALL_BODY_BYTES:
            checked = await self._checked(lambda: self._check(body))
            if not checked.has_media:
                return await self._checked(lambda: open_chat_request(checked, {}, self._limits))
        return await self._decoders.open(body, self._fetched)

    async def _checked(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._checking, work)

    def _check(self, body: bytes | bytearray) -> CheckedChat:
        voices = self._bound.family.voices
        return check_chat_request(body, models=[self._config.model], voices=voices, limits=self._limits)

    async def _fetched(self, urls: Sequence[MediaUrl]) -> dict[str, bytes]:
        """What the URLs lead to, by their params; when one fails, none of the others is waited for."""
        total = TotalBytes(self._limits.max_body_bytes)
        tasks = [asyncio.create_task(self._fetch(each, total)) for each in urls]
        try:
            return {each.param: data for each, data in zip(urls, await asyncio.gather(*tasks), strict=True)}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, each: MediaUrl, total: TotalBytes) -> bytes:
        made = await self._fetcher.fetch(each.url, each.param)
        total.add(len(made.data), each.param)
        return made.data

    def _omni_request(self, chat: ChatRequest, request_id: str) -> OmniRequest:
        with blamed_on("messages"):
            prompt = self._bound.family.render(chat.messages, chat.tools)
        return OmniRequest(
            # The client's own id may come twice; what stages log begins with it.
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt=prompt,
            media=Media(chat.audios, chat.images, chat.videos),
            wants_audio=chat.wants_audio,
            voice=chat.voice,
            sampling=stage_sampling(chat, self._config),
            seed=chat.seed if chat.seed is not None else random.getrandbits(31),
            streams_audio=chat.stream and chat.wants_audio,
        )

    def _answer(self, request: Posted) -> Answer:
        return Answer(request.request.request_id, {s.model_stage: s.final_output_type for s in self._config.stages})

    async def _whole(self, chat: ChatRequest, request: Posted, deadline: Deadline) -> Response:
        output = await self._answered(request, deadline)
        return await asyncio.to_thread(self._completed, chat, output)

    def _completed(self, chat: ChatRequest, output: OmniRequestOutput) -> Response:
        """The sound of a minute takes seconds to code, and is megabytes of JSON."""
        sound = whole_audio(chat, output.audio) if chat.wants_audio else None
        body = completion(
            chat,
            text=output.text,
            audio=sound,
            finish_reason=finish_reason(output),
            usage=self._usage(output),
            choices=output.choices,
        )
        return JSONResponse(body | {"omni": timings(output)})

    async def _streamed(self, chat: ChatRequest, request: Posted, deadline: Deadline, meter: HttpMeter) -> Response:
        """Answers once the first chunk is there, so that what fails before it has an HTTP status of its own."""
        answer = self._answer(request)
        events = heard(self._orchestrator.stream(request, deadline), meter)
        first = await anext(events)
        body = self._sse(chat, answer, first, events)
        return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _sse(
        self, chat: ChatRequest, answer: Answer, first: StageEvent, events: AsyncGenerator[StageEvent, None]
    ) -> AsyncIterator[bytes]:
        stream, sound = ChatStream(chat), StreamedSound(chat.audio_format)
        off_loop = OffLoop(self._coding, sound.close)
        try:
            async with contextlib.aclosing(events):
                yield sse.event(stream.start())
                async for event in chain(first, events):
                    answer.add(event.stage, event.chunk)
                    if event.chunk.text or event.chunk.choices:
                        yield sse.event(stream.text(event.chunk.text, event.chunk.choices))
                    if (pcm := event.chunk.pcm) is not None:
                        said = functools.partial(_sound_event, stream, functools.partial(sound.push, pcm))
                        if piece := said() if sound.is_quick(pcm) else await off_loop.run(said):
                            yield piece
            if rest := await off_loop.run(functools.partial(_sound_event, stream, sound.flush)):
                yield rest
            output = answer.finish()
            yield sse.event(stream.finish(finish_reason(output)) | {"omni": timings(output)})
            if (usage := stream.usage(self._usage(output))) is not None:
                yield sse.event(usage)
            yield sse.DONE
        except Exception as error:  # the boundary to the client, after the first byte
            status, body = error_answer(error)
            yield sse.error_event(body["error"]["message"], status=status, code=body["error"]["code"])
        finally:
            off_loop.close()

    async def __del__(self) -> None:
        self._decoders.close()
        await self._fetcher.close()
        self._controller.shutdown(wait=False)

    def _usage(self, output: OmniRequestOutput) -> Usage:
        spoken = sum(
            len(output.stage_token_ids.get(s.model_stage, ())) for s in self._config.stages if s.engine_input_source
        )
        return Usage(len(output.prompt_token_ids), len(output.token_ids), spoken)


def until_client_leaves(app: ASGIApp) -> ASGIApp:
    """The app with a `receive` as ASGI has it: once the client has left, Serve's may raise what ended its own call."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await app(scope, received, send)

    return called


def _sound_event(stream: ChatStream, made: Callable[[], bytes]) -> bytes:
    """The event of a piece of sound; no bytes where none may be sent yet."""
    piece = made()
    return sse.event(stream.audio(piece)) if piece else b""
