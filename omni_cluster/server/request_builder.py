"""Builds requests of the pipeline for every endpoint, whatever a client's request looks like."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

from omni_cluster.engine.pipeline import Pipeline
from omni_cluster.openai_api.chat import ChatRequest
from omni_cluster.openai_api.errors import blamed_on
from omni_cluster.openai_api.speech import SpeechRequest
from omni_cluster.server.answers import check_token_ids, stage_sampling
from omni_cluster.server.conversation import conversation_of
from omni_cluster.types.inputs import Media, OmniRequest


class RequestBuilder:
    """Makes requests that the pipeline takes. Call it off the event loop: to render a prompt, and to check, takes long.

    An endpoint renders its prompt by `pipeline.bound.family` and gives a draft to `build`; no JSON is needed.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._bound = pipeline.bound

    def build(self, draft: OmniRequest, seed: int | None = None) -> OmniRequest:
        """The draft with an id of its own, which begins with the draft's, and a seed: by chance if `seed` is None.

        Raises RequestError for what no stage would take.
        """
        request = replace(
            draft,
            # The client's own id may come twice; what stages log begins with it.
            request_id=f"{draft.request_id}-{uuid.uuid4().hex[:8]}",
            seed=random.getrandbits(31) if seed is None else seed,
        )
        self._pipeline.check(request)
        return request

    def of_chat(self, chat: ChatRequest, request_id: str, prompt_param: str = "messages") -> OmniRequest:
        """The request of a checked chat. `prompt_param`: the field that has the prompt. Raises RequestError."""
        check_token_ids(chat, self._bound)
        with blamed_on(prompt_param):
            prompt = self._bound.family.render(chat.messages, chat.tools)
        draft = OmniRequest(
            request_id=request_id,
            prompt=prompt,
            media=Media(chat.audios, chat.images, chat.videos),
            wants_audio=chat.wants_audio,
            wants_images=chat.wants_images,
            voice=chat.voice,
            sampling=stage_sampling(chat, self._bound.config),
            streams_audio=chat.stream and chat.wants_audio,
            conversation=conversation_of(chat),
            tool_use=chat.tool_use,
            adapter=self._bound.adapter_of(chat.model),
        )
        with blamed_on("modalities"):
            self._bound.check_made(draft.modalities)
        return self.build(draft, chat.seed)

    def of_speech(self, spoken: SpeechRequest, request_id: str) -> OmniRequest:
        """The request that reads a text aloud. Raises RequestError."""
        family = self._bound.family
        with blamed_on("input"):
            prompt = family.reading(spoken.text)
        for field, value in spoken.speaking.items():
            with blamed_on(field):
                family.check_speaking(field, value)
        draft = OmniRequest(
            request_id=request_id,
            prompt=prompt,
            voice=spoken.voice,
            sampling={} if spoken.seed is None else self._seeded(spoken.seed),
            streams_audio=spoken.stream_format is not None,
            reply=spoken.text,
            speaking=spoken.speaking,
            adapter=self._bound.adapter_of(spoken.model),
        )
        return self.build(draft, spoken.seed)

    def _seeded(self, seed: int) -> dict[str, dict[str, Any]]:
        return {name: {"seed": seed} for name, spec in self._bound.specs.items() if spec.samples_tokens}
