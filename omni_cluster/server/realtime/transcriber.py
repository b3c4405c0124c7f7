"""Writes down what the user of a session said."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.pipeline import answer_progress
from omni_cluster.models.family import Hearing
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.languages import language_name
from omni_cluster.openai_api.realtime.items import Item
from omni_cluster.openai_api.realtime.session import Transcription
from omni_cluster.server.answers import text_sampling
from omni_cluster.server.realtime.outlet import Outlet
from omni_cluster.server.refusals import error_answer
from omni_cluster.server.services import Services
from omni_cluster.server.streamed import open_stream
from omni_cluster.types.inputs import Media, OmniRequest

EVENT = "conversation.item.input_audio_transcription"
ITEM_IS_GONE = "The item left the conversation before it was written down."
TURNED_OFF = "Transcription was turned off before the item was written down."


async def write_down(
    its: Services, connection: HTTPConnection, outlet: Outlet, item: Item, settings: Transcription, model: str
) -> None:
    """Sends the words of a spoken item as they are found by a request for text; at the end the item has them, too."""
    place = {"item_id": item.id, "content_index": 0}
    try:
        text = ""
        async with its.admission.admit(connection) as admitted:
            request_id = connection.scope["state"]["request_id"]
            request = await its.reader.off_loop(lambda: _request(its, request_id, item.audios[0], settings, model))
            progress = answer_progress(its.bound)
            async with contextlib.aclosing(await open_stream(its.pipeline, request, admitted, progress)) as stream:
                async for chunk in stream:
                    if chunk.text:
                        text += chunk.text
                        sent = await outlet.send(f"{EVENT}.delta", **place, delta=chunk.text)
                        admitted.meter.count_sent(sent)
        item.write(content=[{**item.wire["content"][0], "transcript": text}])
        await outlet.send(f"{EVENT}.completed", **place, transcript=text, usage=_usage(progress))
    except WebSocketDisconnect:
        raise
    except Exception as error:  # the boundary to the client: what breaks is the end of this transcription alone
        body = error_answer(error)[1]["error"]
        await outlet.send(f"{EVENT}.failed", **place, error=body)


async def give_up(outlet: Outlet, item_id: str, why: str) -> None:
    error = BadRequest(why, code="item_not_transcribed").body()["error"]
    await outlet.send(f"{EVENT}.failed", item_id=item_id, content_index=0, error=error)


def _request(
    its: Services, request_id: str, samples: npt.NDArray[np.float32], settings: Transcription, model: str
) -> OmniRequest:
    """Raises RequestError."""
    language = language_name(settings.language, "language") if settings.language else None
    draft = OmniRequest(
        request_id=request_id,
        prompt=its.bound.family.hearing(Hearing(language, None, settings.prompt or "")),
        media=Media(audios=(samples,)),
        wants_audio=False,
        sampling=text_sampling({"temperature": 0.0}, its.bound.config),
        adapter=its.bound.adapter_of(model),
    )
    return its.builder.build(draft)


def _usage(progress: AnswerProgress) -> dict[str, Any]:
    tokens = progress.counts
    return {
        "type": "tokens",
        "input_tokens": tokens.prompt,
        "output_tokens": tokens.text,
        "total_tokens": tokens.prompt + tokens.text,
        "input_token_details": {
            "text_tokens": tokens.prompt - tokens.prompt_audio,
            "audio_tokens": tokens.prompt_audio,
        },
    }
