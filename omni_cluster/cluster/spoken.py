"""The stream of `/v1/audio/speech`: the sound of a text as it is made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from omni_cluster.cluster.answers import error_answer
from omni_cluster.engine.answer import Answer
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.encoding import SoundEncoder
from omni_cluster.openai_api.speech import SpeechRequest, delta_event, done_event
from omni_cluster.outputs import OmniRequestOutput


async def spoken_sound(
    spoken: SpeechRequest, answer: Answer, events: AsyncGenerator[StageEvent, None]
) -> AsyncIterator[bytes]:
    """The body of the answer: raw bytes of one file, or server-sent events with its pieces.

    What breaks after the first byte is an event; raw bytes just end, which cuts the connection off.
    """
    as_events = spoken.stream_format == "sse"
    try:
        async with contextlib.aclosing(coded(spoken, answer, events)) as pieces:
            async for piece in pieces:
                yield sse.event(delta_event(piece)) if as_events else piece
        if as_events:
            yield sse.event(done_event(*_tokens(answer.finish())))
    except Exception as error:  # the boundary to the client, after the first byte
        status, body = error_answer(error, "input")
        if not as_events:
            raise
        yield sse.error_event(body["error"]["message"], status=status, code=body["error"]["code"])


async def coded(
    spoken: SpeechRequest, answer: Answer, events: AsyncGenerator[StageEvent, None]
) -> AsyncGenerator[bytes, None]:
    """The sound in the format asked for, piece by piece; no bytes for no sound."""
    encoder: SoundEncoder | None = None
    async with contextlib.aclosing(events):
        with contextlib.ExitStack() as cleanup:
            async for event in events:
                answer.add(event.stage, event.chunk)
                pcm = event.chunk.pcm
                if pcm is None:
                    continue
                encoder = encoder or cleanup.enter_context(SoundEncoder(pcm.sample_rate_hz, spoken.format))
                if piece := encoder.push(pcm.samples):
                    yield piece
            if encoder is not None and (rest := encoder.finish()):
                yield rest


def _tokens(output: OmniRequestOutput) -> tuple[int, int]:
    """Tokens of the text, and codec tokens: those of every stage but the one that says the text."""
    spoken = sum(len(tokens) for tokens in output.stage_token_ids.values()) - len(output.token_ids)
    return len(output.token_ids), spoken
