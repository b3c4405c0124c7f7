"""What LiveKit's own command line has of a console: a microphone and speakers for an agent, which connects by TCP.

    python livekit_console.py AGENT.py SPEECH.wav

Says the file, again once the agent has spoken for some seconds, and hears the second answer to its end. Prints what the
session told as JSON, and keeps in answer.wav what was played.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import wave
from typing import Any

from livekit import rtc
from livekit.protocol.agent_pb import agent_session

AGENT, SPEECH = sys.argv[1:]
RATE_HZ, WIRE_HZ = 24_000, 48_000
PIECE_S = 0.04
PIECE_BYTES = int(PIECE_S * RATE_HZ) * 2
PLAYED_BYTES = int(PIECE_S * WIRE_HZ) * 2
INTERRUPTS_S = 4.0
"""Into the first answer, once its first three seconds are over: an agent cannot be interrupted before."""
PATIENCE_S = 180

Message = agent_session.AgentSessionMessage
Console = Message.ConsoleIO


class Devices:
    """Both, in real time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._spoken = bytearray()
        self._waiting = bytearray()
        self._is_whole = False
        self._resampler = rtc.AudioResampler(input_rate=RATE_HZ, output_rate=WIRE_HZ, num_channels=1)
        self.played = bytearray()
        self.items: list[dict[str, Any]] = []
        self.cleared = self.finished = 0
        """How often playing ended before and at the end of what there was."""

    def say(self) -> None:
        with wave.open(SPEECH) as file:
            self._spoken += file.readframes(file.getnframes())

    @property
    def played_s(self) -> float:
        return len(self.played) / (2 * WIRE_HZ)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        next_s = clock()
        while True:
            self._listen()
            self._play()
            next_s += PIECE_S
            await asyncio.sleep(next_s - clock())

    def _listen(self) -> None:
        piece = bytes(self._spoken[:PIECE_BYTES]).ljust(PIECE_BYTES, b"\0")
        del self._spoken[:PIECE_BYTES]
        for frame in self._resampler.push(rtc.AudioFrame(piece, RATE_HZ, 1, len(piece) // 2)):
            samples = frame.samples_per_channel
            sound = Console.AudioFrame(
                data=bytes(frame.data), sample_rate=WIRE_HZ, num_channels=1, samples_per_channel=samples
            )
            self._send(Message(audio_input=sound))

    def _play(self) -> None:
        self.played += self._waiting[:PLAYED_BYTES]
        del self._waiting[:PLAYED_BYTES]
        if self._is_whole and not self._waiting:
            self._is_whole = False
            self.finished += 1
            self._send(Message(audio_playback_finished=Console.AudioPlaybackFinished()))

    def _send(self, message: Message) -> None:
        data = message.SerializeToString()
        self._writer.write(struct.pack(">I", len(data)) + data)

    async def read(self) -> None:
        while True:
            (size,) = struct.unpack(">I", await self._reader.readexactly(4))
            self._take(Message.FromString(await self._reader.readexactly(size)))

    def _take(self, message: Message) -> None:
        kind = message.WhichOneof("message")
        if kind == "audio_output":
            self._waiting += message.audio_output.data
        elif kind == "audio_playback_flush":
            self._is_whole = bool(self._waiting)
        elif kind == "audio_playback_clear" and self._waiting:
            self._waiting.clear()
            self._is_whole = False
            self.cleared += 1
        elif kind == "event" and message.event.conversation_item_added.item.WhichOneof("item") == "message":
            said = message.event.conversation_item_added.item.message
            role = agent_session.ChatRole.Name(said.role)
            self.items.append({"role": role, "text": "".join(part.text for part in said.content)})

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                await asyncio.sleep(PIECE_S)


async def talk(devices: Devices) -> None:
    devices.say()
    await devices.until(lambda: devices.played_s > INTERRUPTS_S)
    devices.say()
    await devices.until(lambda: devices.cleared)
    await devices.until(lambda: devices.finished and sum(each["role"] == "ASSISTANT" for each in devices.items) == 2)


async def main() -> None:
    connected: asyncio.Queue[Any] = asyncio.Queue()
    server = await asyncio.start_server(lambda *both: connected.put_nowait(both), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    command = [sys.executable, "-m", "livekit.agents", "console", AGENT, "--connect-addr", f"{host}:{port}"]
    agent = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    devices = Devices(*await asyncio.wait_for(connected.get(), PATIENCE_S))
    tasks = [asyncio.create_task(devices.run()), asyncio.create_task(devices.read())]
    try:
        await talk(devices)
    finally:
        for task in tasks:
            task.cancel()
        agent.terminate()
        await agent.wait()
    with wave.open("answer.wav", "wb") as file:
        file.setparams((1, 2, WIRE_HZ, 0, "NONE", None))
        file.writeframes(devices.played)
    print(json.dumps({"items": devices.items, "cleared": devices.cleared, "finished": devices.finished}))


asyncio.run(main())
