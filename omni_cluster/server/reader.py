"""From the body of an HTTP request to what it asks for, checked, with its media decoded, and what is built of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request

from omni_cluster.engine.build import BoundPipeline
from omni_cluster.openai_api.chat import ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.decoder import Form
from omni_cluster.openai_api.decoders import Decoders, Fetch
from omni_cluster.openai_api.fetch import Fetcher, TotalBytes
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.multipart import FORM_TYPE, HEADS_BYTES
from omni_cluster.openai_api.paths import Paths
from omni_cluster.openai_api.responses import (
    ResponsesRequest,
    check_responses_request,
    open_responses_request,
)
from omni_cluster.openai_api.speech import SpeechRequest, parse_speech_request
from omni_cluster.openai_api.transcription import Task, TranscriptionRequest
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.body import JSON_TYPE, check_origin
from omni_cluster.server.limits import api_defaults, api_limits, decoder_limits, fetch_limits

SMALL_BODY_BYTES = 65_536
"""What is checked beside other requests, in some milliseconds; more is a decoder's work."""
CHECKING_THREADS = 4
LARGE_THREADS = 2
"""For prompts of large bodies: a text that is long or has marks is tokenised, half a second for a megabyte."""
FETCHES_AT_ONCE = 4
"""Of one request: one that names many URLs leaves room for others' fetches."""
T = TypeVar("T")
Built = TypeVar("Built")
Made = TypeVar("Made", covariant=True)


class ParsesText(Protocol[Made]):
    """What reads a body without media."""

    def __call__(self, body: bytes | bytearray, *, models: Collection[str], limits: ApiLimits) -> Made: ...


class Reader:
    """Reads and checks bodies, off the event loop; what media cost is paid by processes of their own."""

    def __init__(self, bound: BoundPipeline) -> None:
        self._models = bound.config.models
        self._voices = bound.family.voices
        self._origins = bound.config.api.cors_origins
        self._limits = api_limits(bound.config)
        self._fetcher = Fetcher(fetch_limits(bound.config))
        self._defaults = api_defaults(bound)
        self._max_codec_tokens = bound.config.limits.max_codec_tokens
        self._decoders = Decoders(
            decoder_limits(bound.config), self._limits, self._models, self._voices, self._defaults
        )
        # Of their own: what takes long in one of them keeps nothing in another waiting.
        self._threads = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="checking")
        self._large_threads = ThreadPoolExecutor(LARGE_THREADS, thread_name_prefix="large")

    async def stand_by(self) -> None:
        """Keeps a decoder ready for the next request with media, until it is cancelled."""
        await self._decoders.keep_one_ready()

    async def chat(self, http_request: Request, build: Callable[[ChatRequest], Built]) -> Built:
        """What `build` makes of the checked chat, off the event loop: with the checks in one call, if it has no media.

        Raises BadRequest; all that can be refused without the media is refused before any is fetched.
        """

        def built(body: bytearray) -> Built | None:
            checked = check_chat_request(
                body, models=self._models, voices=self._voices, limits=self._limits, defaults=self._defaults
            )
            return None if checked.has_media else build(open_chat_request(checked, {}, self._limits))

        return await self._built(http_request, built, self._decoders.open, build)

    async def response(self, http_request: Request, build: Callable[[ResponsesRequest], Built]) -> Built:
        """As `chat`, of a body for `/v1/responses`."""

        def built(body: bytearray) -> Built | None:
            checked = check_responses_request(body, models=self._models, limits=self._limits)
            return None if checked.has_media else build(open_responses_request(checked, {}, self._limits))

        return await self._built(http_request, built, self._decoders.open_response, build)

    async def _built(
        self,
        http_request: Request,
        without_media: Callable[[bytearray], Built | None],
        open_media: Callable[[bytearray, Fetch], Awaitable[T]],
        build: Callable[[T], Built],
    ) -> Built:
        body = await self._body(http_request, self._limits.max_body_bytes)
        # A large one would keep the interpreter, and with it every other request, for its checks alone.
        if len(body) <= SMALL_BODY_BYTES and (built := await self.off_loop(lambda: without_media(body))) is not None:
            return built
        opened = await open_media(body, self._fetched)
        return await self.off_loop(lambda: build(opened), len(body))

    async def speech(self, http_request: Request, build: Callable[[SpeechRequest], Built]) -> Built:
        """Raises BadRequest."""
        body = await self._body(http_request, min(SMALL_BODY_BYTES, self._limits.max_body_bytes))
        return await self.spoken(body, build)

    async def spoken(self, body: bytes | bytearray, build: Callable[[SpeechRequest], Built]) -> Built:
        """As `speech`, of a body that is here."""

        def built() -> Built:
            spoken = parse_speech_request(
                body,
                models=self._models,
                voices=self._voices,
                defaults=self._defaults,
                max_codec_tokens=self._max_codec_tokens,
            )
            return build(spoken)

        return await self.off_loop(built)

    async def transcription(self, http_request: Request, task: Task) -> TranscriptionRequest:
        """Raises BadRequest; the form is read, and its sound decoded, by a process of its own."""
        check_origin(http_request, self._origins)
        most_bytes = min(self._limits.max_body_bytes, self._limits.max_media_bytes + HEADS_BYTES)
        body = await self._body(http_request, most_bytes, FORM_TYPE)
        return await self._decoders.open_form(body, Form(http_request.headers["content-type"], task))

    async def pictures(self, urls: Mapping[str, str]) -> tuple[npt.NDArray[np.uint8], ...]:
        """Pictures of data URLs by the client's own paths, uint8 RGB `[H, W, 3]`, decoded by a process of its own.

        Raises BadRequest that names such a path.
        """
        paths = Paths()
        for i, own in enumerate(urls):
            paths.note(f"messages[0].content[{i}].image_url.url", own)
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls.values()]
        body = {"model": self._models[0], "messages": [{"role": "user", "content": parts}]}
        with paths.translated():
            chat = await self._decoders.open(json.dumps(body).encode(), self._fetched)
        return chat.images

    async def text(self, http_request: Request, parse: ParsesText[T], build: Callable[[T], Built]) -> Built:
        """What `build` makes of a body that is little but a prompt: it is as long as one may be. Raises BadRequest."""
        body = await self._body(http_request, min(self._limits.max_body_bytes, self._limits.max_text_chars))
        return await self.off_loop(lambda: build(parse(body, models=self._models, limits=self._limits)), len(body))

    async def _body(self, http_request: Request, max_bytes: int, media_type: str = JSON_TYPE) -> bytearray:
        admitted: AdmittedRequest = http_request.state.admitted
        return await admitted.body(http_request, max_bytes, media_type)

    async def off_loop(self, work: Callable[[], T], body_bytes: int = 0) -> T:
        """Does the work in a thread, and returns its result. That of large bodies keeps no small one waiting."""
        threads = self._threads if body_bytes <= SMALL_BODY_BYTES else self._large_threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def _fetched(self, urls: Sequence[MediaUrl]) -> dict[str, bytes]:
        """What the URLs lead to, by their params; when one fails, none of the others is waited for."""
        total, at_once = TotalBytes(self._limits.max_body_bytes), asyncio.Semaphore(FETCHES_AT_ONCE)
        tasks = [asyncio.create_task(self._fetch(each, total, at_once)) for each in urls]
        try:
            return {each.param: data for each, data in zip(urls, await asyncio.gather(*tasks), strict=True)}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, each: MediaUrl, total: TotalBytes, at_once: asyncio.Semaphore) -> bytes:
        async with at_once:
            data = await self._fetcher.fetch(each.url, each.param)
        total.add(len(data), each.param)
        return data

    async def close(self) -> None:
        self._decoders.close()
        await self._fetcher.close()
        for threads in (self._threads, self._large_threads):
            threads.shutdown(wait=False)
