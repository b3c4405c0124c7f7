"""Speaks to the bot in real time: python speak.py A.wav [B.wav ...]

Each further file is said half a second into the answer before it. The answers are printed, and kept in answer.wav.
"""

import asyncio
import os
import sys
import time
import wave

from pipecat.frames.frames import InputAudioRawFrame, InputTransportMessageFrame, OutputAudioRawFrame
from pipecat.serializers.protobuf import ProtobufFrameSerializer
from websockets.asyncio.client import connect

BOT_URL = os.environ.get("BOT_URL", "ws://127.0.0.1:8765")
RATE_HZ = 24_000  # of 16-bit samples, one channel
CHUNK_S = 0.04
SAMPLES = int(CHUNK_S * RATE_HZ)
INTERRUPTS_S = 0.5
PATIENCE_S = 60


class Answers:
    """What the bot says. `turn`, of the user: spoken, committed or answered; `began_s`: since when the bot speaks."""

    def __init__(self, file):
        self.file = file
        self.file.setparams((1, 2, RATE_HZ, 0, "NONE", None))
        self.turn, self.began_s = "spoken", None

    async def read(self, socket, serializer):
        async for data in socket:
            frame = await serializer.deserialize(data)
            if isinstance(frame, InputAudioRawFrame):
                self.file.writeframes(frame.audio)
            elif isinstance(frame, InputTransportMessageFrame):
                self.take(frame.message["type"], frame.message.get("data") or {})

    def take(self, kind, data):
        """A message of RTVI, the protocol of Pipecat's clients."""
        if kind == "bot-llm-text":
            print(data["text"], end="", flush=True)
        elif kind == "user-started-speaking":
            self.turn = "spoken"
            if self.began_s is not None:
                print("\n[interrupted]", flush=True)
        elif kind == "user-stopped-speaking":
            self.turn = "committed"
        elif kind == "bot-started-speaking":
            self.began_s = time.monotonic()
        elif kind == "bot-stopped-speaking":
            self.began_s = None
            if self.turn == "committed":
                self.turn = "answered"
                print(flush=True)


def said(name, answers, is_interrupted):
    """The chunks of a file, and of silence until its answer has ended, or is to be interrupted."""
    answers.turn = "spoken"
    with wave.open(name) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE_HZ, 1, 2):
            sys.exit(f"{name} has another format; convert it by: ffmpeg -i {name} -ar {RATE_HZ} -ac 1 other.wav")
        while chunk := file.readframes(SAMPLES):
            yield chunk.ljust(2 * SAMPLES, b"\0")
    until_s = time.monotonic() + PATIENCE_S
    while answers.turn != "answered":
        speaks_s = time.monotonic() - answers.began_s if answers.began_s else 0
        if is_interrupted and answers.turn == "committed" and speaks_s >= INTERRUPTS_S:
            return
        if speaks_s:
            until_s = time.monotonic() + PATIENCE_S
        if time.monotonic() > until_s:
            sys.exit(f"No answer to {name} came within {PATIENCE_S} s.")
        yield bytes(2 * SAMPLES)


async def main(names):
    serializer = ProtobufFrameSerializer()
    with wave.open("answer.wav", "wb") as file:
        answers = Answers(file)
        async with connect(BOT_URL) as socket:
            reads = asyncio.create_task(answers.read(socket, serializer))
            next_s = time.monotonic()
            for number, name in enumerate(names, 1):
                for chunk in said(name, answers, number < len(names)):
                    await socket.send(await serializer.serialize(OutputAudioRawFrame(chunk, RATE_HZ, 1)))
                    next_s += CHUNK_S
                    await asyncio.sleep(next_s - time.monotonic())
            reads.cancel()


if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    asyncio.run(main(sys.argv[1:]))
except OSError as error:  # no bot there, no such file
    sys.exit(str(error))
