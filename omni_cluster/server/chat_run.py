"""A checked chat as a request of the pipeline: the same for every endpoint that takes a chat."""

from __future__ import annotations

import random
import uuid

from omni_cluster.engine.pipeline import Pipeline
from omni_cluster.inputs import Media, OmniRequest
from omni_cluster.openai_api.chat import ChatRequest
from omni_cluster.openai_api.errors import blamed_on
from omni_cluster.server.answers import check_token_ids, stage_sampling
from omni_cluster.server.conversation import conversation_of


def omni_request(pipeline: Pipeline, chat: ChatRequest, request_id: str, prompt_param: str = "messages") -> OmniRequest:
    """Renders the prompt: call it off the event loop. `prompt_param`: the field that has the prompt.

    Raises RequestError for what no stage would take.
    """
    bound = pipeline.bound
    check_token_ids(chat, bound)
    with blamed_on(prompt_param):
        prompt = bound.family.render(chat.messages, chat.tools)
    request = OmniRequest(
        # The client's own id may come twice; what stages log begins with it.
        request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
        prompt=prompt,
        media=Media(chat.audios, chat.images, chat.videos),
        wants_audio=chat.wants_audio,
        voice=chat.voice,
        sampling=stage_sampling(chat, bound.config),
        seed=chat.seed if chat.seed is not None else random.getrandbits(31),
        streams_audio=chat.stream and chat.wants_audio,
        conversation=conversation_of(chat),
        tool_use=chat.tool_use,
    )
    pipeline.check(request)
    return request
