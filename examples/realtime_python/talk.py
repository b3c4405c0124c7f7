"""A conversation by voice over OpenAI's Realtime API, from WAV files or by microphone and speakers.

    python talk.py                           by microphone and speakers, until Ctrl-C
    python talk.py A.wav B.wav               says a file, plays the answer, says the next file
    python talk.py --interrupt A.wav B.wav   says the next file half a second into the answer

Prints the answers, and keeps in answer.wav what was played of them.
"""

import argparse
import asyncio
import base64
import os
import sys
import wave

from openai import AsyncOpenAI
from sound import Player, files, microphone
from websockets.exceptions import WebSocketException

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
API_KEY = os.environ.get("API_KEY", "none")
MODEL = os.environ.get("MODEL", "preset:toy")
SESSION = {"type": "realtime", "instructions": "Be brief.", "audio": {"output": {"voice": "Chelsie"}}}


async def follow(connection, player):
    """What the server says: it finds the turns, and ends an answer when speech begins."""
    line_is_open = False
    async for event in connection:
        if event.type == "response.output_audio_transcript.delta":
            line_is_open = True
            print(event.delta, end="", flush=True)
        elif event.type == "response.output_audio.delta":
            player.add(event.item_id, base64.b64decode(event.delta))
        elif event.type == "input_audio_buffer.speech_started":
            played_ms, player.turn = player.stop(), "spoken"
            if played_ms is not None:
                if line_is_open:  # else the answer had ended, and was played still
                    print()
                line_is_open = False
                print(f"[interrupted after {played_ms} ms]", flush=True)
                # The conversation keeps what was played of the answer, and no more.
                await connection.conversation.item.truncate(
                    item_id=player.item_id, content_index=0, audio_end_ms=played_ms
                )
        elif event.type == "input_audio_buffer.committed":
            player.turn = "committed"
        elif event.type == "response.done" and player.end():
            line_is_open = False
            print(flush=True)
        elif event.type == "error":
            print(event.error.message, file=sys.stderr)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE.wav", help="16-bit samples, 24 kHz, one channel")
    parser.add_argument("--interrupt", action="store_true", help="say the next file into the answer")
    asked = parser.parse_args()
    client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY)
    async with client.realtime.connect(model=MODEL) as connection:
        with wave.open("answer.wav", "wb") as file:
            player = Player(file)
            await connection.session.update(session=SESSION)
            follows = asyncio.create_task(follow(connection, player))
            chunks = files(player, asked.files, asked.interrupt) if asked.files else microphone(player)
            async for chunk in chunks:
                await connection.input_audio_buffer.append(audio=base64.b64encode(chunk).decode())
            follows.cancel()


try:
    asyncio.run(main())
except (OSError, WebSocketException) as error:  # no server there, a wrong key, the session's end, no such file
    sys.exit(str(error))
except KeyboardInterrupt:
    pass
