"""`/tokenize` and `/detokenize`: no engine takes part."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from omni_cluster.engine.build import BoundPipeline
from omni_cluster.openai_api import openapi
from omni_cluster.openai_api.errors import blamed_on, invalid
from omni_cluster.openai_api.tokens import (
    DetokenizeBody,
    TokenizeBody,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)
from omni_cluster.server.admission import AdmittedRequest
from omni_cluster.server.routes import add_post
from omni_cluster.server.services import Services
from omni_cluster.types.inputs import Prompt


class TokensEndpoint:
    """Text to tokens, and back."""

    def __init__(self, services: Services) -> None:
        self._its = services

    def add_to(self, api: FastAPI) -> None:
        for name, answer, kind, prompt in (
            ("tokenize", self.tokenize, TokenizeBody, "prompt"),
            ("detokenize", self.detokenize, DetokenizeBody, "tokens"),
        ):
            body = openapi.request_body(kind, self._its.bound.config.models)
            add_post(api, f"/{name}", answer, body=body, gives=("application/json",), prompt=prompt, name=name)

    async def tokenize(self, http_request: Request, _: AdmittedRequest) -> Response:
        return await self._its.reader.text(http_request, parse_tokenize, self._tokens)

    async def detokenize(self, http_request: Request, _: AdmittedRequest) -> Response:
        return await self._its.reader.text(http_request, parse_detokenize, self._text)

    def _tokens(self, asked: TokenizeRequest) -> Response:
        prompts = self._its.bound.family.prompts
        token_ids = prompts.ids(self._prompt(asked))
        body = {
            "count": len(token_ids),
            "max_model_len": _longest(self._its.bound),
            "tokens": list(token_ids),
            "token_strs": prompts.strings(token_ids) if asked.wants_strings else None,
        }
        return JSONResponse(body)

    def _prompt(self, asked: TokenizeRequest) -> Prompt:
        if asked.prompt is not None:
            return Prompt(asked.prompt)
        with blamed_on("messages"):
            return self._its.bound.family.render(asked.messages, asked.tools)

    def _text(self, tokens: Sequence[int]) -> Response:
        most = self._its.bound.family.vocab_size - 1
        place = next((place for place, token in enumerate(tokens) if token > most), None)
        if place is not None:
            param = f"tokens[{place}]"
            raise invalid(param, f"{param} is {tokens[place]}, but the model's tokens are 0 to {most}.")
        return JSONResponse({"prompt": self._its.bound.family.prompts.text(tokens)})


def _longest(bound: BoundPipeline) -> int:
    """Tokens of the longest prompt and its answer, in the stage that a request enters; of a prompt, if none is set.

    The engine would tell what the model was made for: to read that here takes the libraries of engines.
    """
    stage = next(each for each in bound.config.stages if not each.engine_input_source)
    return int(stage.engine_args.get("max_model_len") or bound.config.limits.max_prompt_tokens)
