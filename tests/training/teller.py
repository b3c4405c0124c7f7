"""A pipeline that tells what it was given to tell, in a tone if nothing else: high in one voice, low in the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.models.qwen2_5_omni.voices import LOW_VOICE
from omni_cluster.serve_local import listening, serving
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.server.keyed import config_of
from tests.server.speaker import Speaker
from tests.training.sayings import chord
from training.saying import ANSWER_HZ
from training.speech import Sound

CODES = 150
HIGH_HZ, LOW_HZ = 220.0, 110.0


def tone(text: str, voice: str) -> Sound:
    return chord(CODES, LOW_HZ if voice == LOW_VOICE else HIGH_HZ)


class Teller(Speaker):
    """`tell`: the answer to what it is asked. `voiced`: its sound in a voice."""

    tell: Callable[[OmniRequest], str]
    voiced: Callable[[str, str], Sound]

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        text = self.tell(request)
        prompt = tuple(range(len(request.prompt.text.split()) if not isinstance(request.prompt, str) else 1))
        yield StageEvent("thinker", StageChunk(token_ids=(1,), text=text, prompt_token_ids=prompt))
        if request.wants_audio:
            sound = AudioChunk(0, self.voiced(text, str(request.voice)), ANSWER_HZ)
            yield StageEvent("code2wav", StageChunk(audio=sound))
        yield StageEvent("thinker", StageChunk(token_start=1, finish_reason="stop"))


@asynccontextmanager
async def telling(
    folder: Path, tell: Callable[[OmniRequest], str], voiced: Callable[[str, str], Sound] = tone
) -> AsyncIterator[str]:
    """The address of a server over it."""
    teller = Teller(config_of(folder))
    teller.tell, teller.voiced = tell, voiced
    with listening("127.0.0.1", 0) as listener:
        async with serving(teller, listener) as server:
            yield server.url
