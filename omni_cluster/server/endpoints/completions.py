"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.openai_api import openapi, sse
from omni_cluster.openai_api.completion import Usage
from omni_cluster.openai_api.errors import blamed_on
from omni_cluster.openai_api.text_completion import (
    ChoiceText,
    CompletionBody,
    CompletionRequest,
    TextStream,
    parse_completion,
)
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.answers import check_text_ids, finish_reason, text_sampling, usage
from omni_cluster.server.endpoints.chat import choices_of
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import AnswerStream, closing_all, gathered, merged, open_streams, whole_output
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput

_PROMPT = "prompt"
_Group = list[tuple[OmniRequest, AnswerStream[AnswerProgress]]]
"""Choices that run at once."""


class CompletionsEndpoint:
    """Goes on with texts as they are. Few choices of a request are made at once: it has one place."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        add_post(
            api,
            "/v1/completions",
            self.completions,
            body=openapi.request_body(CompletionBody, self._its.bound.config.models),
            gives=("application/json", "text/event-stream"),
            prompt=_PROMPT,
            name="completions",
        )

    async def completions(self, http_request: Request, admitted: AdmittedRequest) -> Response:
        build = functools.partial(self._built, http_request.state.request_id)
        asked, requests = await self._its.reader.text(http_request, parse_completion, build)
        answered = self._streamed if asked.stream else self._whole
        return await answered(asked, requests, admitted)

    def _built(self, request_id: str, asked: CompletionRequest) -> tuple[CompletionRequest, list[OmniRequest]]:
        """With a request of each choice, those of a prompt beside each other."""
        with blamed_on(_PROMPT):
            prompts = [self._its.bound.family.completing(prompt) for prompt in asked.prompts]
        check_text_ids(asked.sampling, self._its.bound)
        sampling = text_sampling(asked.sampling, self._its.bound.config)
        adapter = self._its.bound.adapter_of(asked.model)
        drafts = [
            OmniRequest(request_id, prompt, wants_audio=False, sampling=sampling, adapter=adapter) for prompt in prompts
        ]
        requests = [self._its.builder.build(draft, asked.seed) for draft in drafts]
        return asked, [choice for request in requests for choice in choices_of(request, asked.n)]

    def _groups(self, requests: Sequence[OmniRequest]) -> list[Sequence[OmniRequest]]:
        """Those that run at once, as many as of a chat."""
        most = self._its.bound.config.limits.max_choices
        return [requests[start : start + most] for start in range(0, len(requests), most)]

    async def _whole(
        self, asked: CompletionRequest, requests: Sequence[OmniRequest], admitted: AdmittedRequest
    ) -> Response:
        outputs: list[OmniRequestOutput] = []
        for group in self._groups(requests):
            outputs += await gathered([whole_output(self._its.pipeline, request, admitted) for request in group])
        return await asyncio.to_thread(_completed, asked, requests, outputs)

    async def _streamed(
        self, asked: CompletionRequest, requests: Sequence[OmniRequest], admitted: AdmittedRequest
    ) -> Response:
        begins = functools.partial(self._opened, admitted=admitted)
        first, *later = self._groups(requests)
        body = self._sse(asked, await begins(first), [functools.partial(begins, group) for group in later])
        return sse.EventStream(body)

    async def _opened(self, group: Sequence[OmniRequest], admitted: AdmittedRequest) -> _Group:
        return list(zip(group, await open_streams(self._its.pipeline, group, admitted), strict=True))

    async def _sse(
        self, asked: CompletionRequest, group: _Group, later: Sequence[Callable[[], Awaitable[_Group]]]
    ) -> AsyncIterator[bytes]:
        stream, answers = TextStream(asked), list[AnswerProgress]()
        try:
            for begins in (None, *later):
                group = group if begins is None else await begins()
                said = [
                    _choice(asked, stream, ChoiceText(len(answers) + place, asked.logprobs), request, answer)
                    for place, (request, answer) in enumerate(group)
                ]
                opened = [answer for _, answer in group]
                answers += [answer.progress for answer in opened]
                async with closing_all(opened), contextlib.aclosing(merged(said)) as events:
                    async for event in events:
                        yield event
            if (used := stream.usage(_usage(asked, answers))) is not None:
                yield sse.event(used)
            yield sse.DONE
        except Exception as error:  # the boundary to the client, after the first byte
            yield sse.event(error_answer(error, _PROMPT)[1])


async def _choice(
    asked: CompletionRequest,
    stream: TextStream,
    choice: ChoiceText,
    request: OmniRequest,
    answer: AnswerStream[AnswerProgress],
) -> AsyncGenerator[bytes, None]:
    """The events of one choice."""
    if asked.echo:
        yield sse.event(stream.chunk(choice.said(str(request.prompt))))
    async for chunk in answer:
        if chunk.text or chunk.choices:
            yield sse.event(stream.chunk(choice.said(chunk.text, chunk.choices)))
    yield sse.event(stream.chunk(choice.said("", finish_reason=finish_reason(answer.progress))))


def _completed(
    asked: CompletionRequest, requests: Sequence[OmniRequest], outputs: Sequence[OmniRequestOutput]
) -> Response:
    choices = [
        ChoiceText(index, asked.logprobs).said(
            (str(request.prompt) if asked.echo else "") + output.text, output.choices, finish_reason(output)
        )
        for index, (request, output) in enumerate(zip(requests, outputs, strict=True))
    ]
    return JSONResponse(TextStream(asked).whole(choices, _usage(asked, outputs)))


def _usage(asked: CompletionRequest, answers: Sequence[OmniRequestOutput | AnswerProgress]) -> Usage:
    """A prompt counts once, however many answers it has."""
    used = [usage(answer) for answer in answers]
    return Usage(
        prompt_tokens=sum(each.prompt_tokens for each in used[:: asked.n]),
        completion_tokens=sum(each.completion_tokens for each in used),
        cached_tokens=sum(each.cached_tokens for each in used[:: asked.n]),
    )
