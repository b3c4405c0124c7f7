"""Pipecat's OpenAI services for a language model, speech to text and text to speech, each in a pipeline."""

from __future__ import annotations

import asyncio
import wave

from pipecat.frames.frames import (
    ErrorFrame,
    InputAudioRawFrame,
    LLMContextFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import run_test
from told import FOLDER, KEY, MAX_TOKENS, MODEL, QUESTION, SAID, SECOND_QUESTION, URL, doing, kept

model = OpenAILLMService.Settings(model=MODEL, max_tokens=MAX_TOKENS, temperature=0)


def llm() -> OpenAILLMService:
    return OpenAILLMService(base_url=URL, api_key=KEY, settings=model)


async def passed(service: FrameProcessor, *frames: object) -> list[object]:
    down, up = await run_test(service, frames_to_send=frames, start_timeout=30)
    for frame in up:
        if isinstance(frame, ErrorFrame):
            raise RuntimeError(frame.error)
    return list(down)


async def said(messages: list[object]) -> str:
    frames = await passed(llm(), LLMContextFrame(LLMContext(messages)))
    return "".join(frame.text for frame in frames if isinstance(frame, LLMTextFrame))


async def main() -> None:
    with doing("stream") as seen:
        seen["text"] = await said([{"role": "user", "content": QUESTION}])
    with doing("second turn") as seen:
        first = await said([{"role": "user", "content": QUESTION}])
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first}]
        seen["text"] = await said([*turns, {"role": "user", "content": SECOND_QUESTION}])
    with doing("chat") as seen:
        seen["text"] = await llm().run_inference(LLMContext([{"role": "user", "content": QUESTION}]))
    with doing("developer") as seen:
        seen["text"] = await said(
            [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        )
    with doing("speech") as seen:
        tts = OpenAITTSService(base_url=URL, api_key=KEY, settings=OpenAITTSService.Settings(model=MODEL))
        frames = await passed(tts, TTSSpeakFrame(SAID))
        data = b"".join(frame.audio for frame in frames if isinstance(frame, TTSAudioRawFrame))
        seen["file"] = kept("speech.pcm", data)
    with doing("padded transcription") as seen:
        stt = OpenAISTTService(base_url=URL, api_key=KEY, settings=OpenAISTTService.Settings(model=MODEL))
        with wave.open(str(FOLDER / "question.wav")) as file:
            rate_hz, sound = file.getframerate(), file.readframes(file.getnframes())
        frames = await passed(
            stt,
            VADUserStartedSpeakingFrame(),
            InputAudioRawFrame(sound, rate_hz, 1),
            VADUserStoppedSpeakingFrame(),
        )
        seen["text"] = "".join(frame.text for frame in frames if isinstance(frame, TranscriptionFrame))


asyncio.run(main())
