"""Both ends of the sound: a microphone and speakers, or files in their place. 16-bit samples, 24 kHz, one channel."""

import asyncio
import sys
import time
import wave

RATE_HZ = 24_000  # what the API takes and gives by default
CHUNK_S = 0.04
SAMPLES = int(CHUNK_S * RATE_HZ)
CHUNK_BYTES = 2 * SAMPLES
INTERRUPTS_MS = 500
PATIENCE_S = 60


class Player:
    """What of an answer waits to be played, and how much of it was. A clock takes it chunk by chunk.

    `file`: a WAV file, which keeps what was played.
    """

    def __init__(self, file):
        self.file = file
        self.file.setparams((1, 2, RATE_HZ, 0, "NONE", None))
        self.waiting = bytearray()
        self.item_id, self.played_bytes = None, 0
        self.is_complete = True  # all of the answer has come
        self.turn = "spoken"  # of the user: spoken, committed, answered

    @property
    def played_ms(self):
        return self.played_bytes * 1000 // (2 * RATE_HZ)

    def add(self, item_id, sound):
        self.item_id, self.is_complete = item_id, False
        self.waiting += sound

    def end(self):
        """All of the answer has come. Returns whether the user has said nothing since it was asked for."""
        self.is_complete = True
        if self.turn != "committed":
            return False
        self.turn = "answered"
        return True

    def take(self):
        chunk = bytes(self.waiting[:CHUNK_BYTES])
        del self.waiting[:CHUNK_BYTES]
        self.played_bytes += len(chunk)
        self.file.writeframes(chunk)
        return chunk.ljust(CHUNK_BYTES, b"\0")

    def stop(self):
        """Silence at once. Returns the milliseconds that were played of an answer that had more, else None."""
        is_late = self.played_bytes and not self.is_complete  # all that came was played, and more is to come
        played_ms = self.played_ms if self.waiting or is_late else None
        self.waiting.clear()
        self.played_bytes = 0
        return played_ms


async def microphone(player):
    """Chunks of the microphone, while the speakers play."""
    try:
        import sounddevice
    except (ImportError, OSError):  # the package, or PortAudio below it
        sys.exit("The microphone needs the package sounddevice, and PortAudio; or name WAV files.")

    loop, chunks = asyncio.get_running_loop(), asyncio.Queue()

    def exchange(spoken, played, *_):
        played[:] = player.take()
        loop.call_soon_threadsafe(chunks.put_nowait, bytes(spoken))

    with sounddevice.RawStream(RATE_HZ, SAMPLES, channels=1, dtype="int16", callback=exchange):
        while True:
            yield await chunks.get()


async def files(player, names, interrupts):
    """Chunks of the files and of the silence between them, in real time, while the answers are played."""
    next_s = time.monotonic()
    for number, name in enumerate(names, 1):
        for chunk in turn_of(player, name, interrupts and number < len(names)):
            yield chunk
            player.take()
            next_s += CHUNK_S
            await asyncio.sleep(next_s - time.monotonic())


def turn_of(player, name, is_interrupted):
    """A file, and silence until its answer is played, or until it is time to interrupt that."""
    player.turn = "spoken"
    with wave.open(name) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE_HZ, 1, 2):
            sys.exit(f"{name} has another format; convert it by: ffmpeg -i {name} -ar {RATE_HZ} -ac 1 other.wav")
        while chunk := file.readframes(SAMPLES):
            yield chunk.ljust(CHUNK_BYTES, b"\0")
    until_s = time.monotonic() + PATIENCE_S
    while player.turn != "answered" or player.waiting:
        if player.waiting:
            until_s = time.monotonic() + PATIENCE_S
        if is_interrupted and player.turn != "spoken" and player.played_ms >= INTERRUPTS_MS:
            return
        if time.monotonic() > until_s:
            sys.exit(f"No answer to {name} came within {PATIENCE_S} s.")
        yield bytes(CHUNK_BYTES)
