"""Where an answer's sound goes: a player of this machine, a file, or both; and sound from a microphone."""

from __future__ import annotations

import contextlib
import importlib
import queue
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from omni_cluster.openai_api.audio import wav_file
from omni_cluster.terminal.server import TerminalError

BYTES_A_SAMPLE: Final = 2
MICROPHONE_HZ: Final = 16_000
MOST_RECORDED_S: Final = 300
PLAYERS: Final = {
    "aplay": "-q -t raw -f S16_LE -c 1 -r {rate_hz} -",
    "ffplay": "-nodisp -autoexit -loglevel error -f s16le -sample_rate {rate_hz} -i -",
}
"""Programs that play 16-bit mono sound of their standard input, with their arguments."""


class Device(Protocol):
    """Plays 16-bit mono sound; `write` takes as long as the sound."""

    def write(self, sound: bytes) -> None: ...

    def close(self) -> None:
        """Returns when all is played."""

    def abort(self) -> None:
        """Stops at once."""


class ProgramDevice:
    """A program that plays what it reads."""

    def __init__(self, command: Sequence[str]) -> None:
        # In a session of its own: Ctrl-C is for the chat, which ends it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def write(self, sound: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was ended, or found no card, and says so itself
            assert self._process.stdin is not None
            self._process.stdin.write(sound)
            self._process.stdin.flush()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def abort(self) -> None:
        self._process.kill()
        self._process.wait()


class SoundDevice:
    """The machine's sound, by the package sounddevice."""

    def __init__(self, library: Any, rate_hz: int) -> None:
        """Raises TerminalError where there is none."""
        self._error: type[Exception] = library.PortAudioError
        try:
            self._stream = library.RawOutputStream(samplerate=rate_hz, channels=1, dtype="int16")
            self._stream.start()
        except self._error as error:
            raise TerminalError(f"no sound can be played ({error}); use --save DIR, or --text.") from None

    def write(self, sound: bytes) -> None:
        with contextlib.suppress(self._error):  # by `abort`
            self._stream.write(sound)

    def close(self) -> None:
        self._stream.stop()
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()


OpenDevice = Callable[[int], Device]
"""By samples a second."""


def found_player() -> OpenDevice | None:
    if (library := _sounddevice()) is not None:
        return lambda rate_hz: SoundDevice(library, rate_hz)
    for name, arguments in PLAYERS.items():
        if path := shutil.which(name):
            command = f"{path} {arguments}"
            return lambda rate_hz: ProgramDevice(shlex.split(command.format(rate_hz=rate_hz)))
    return None


def _sounddevice() -> Any:
    """The package, if it is installed, and what it calls too."""
    try:
        return importlib.import_module("sounddevice")
    except (ImportError, OSError):
        return None


class Playing:
    """Sound that is played beside the chat, which goes on meanwhile; without a player nothing is.

    A context manager: leaving it waits until all is played, and stops at once if that is interrupted.
    """

    def __init__(self, player: OpenDevice | None, rate_hz: int) -> None:
        self._player, self._rate_hz = player, rate_hz
        self._device: Device | None = None
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._plays = threading.Thread(target=self._play, daemon=True)

    def add(self, sound: bytes) -> None:
        """Raises TerminalError for a player that cannot be had."""
        if self._player is None or not sound:
            return
        if self._device is None:
            self._device = self._player(self._rate_hz)
            self._plays.start()
        self._waiting.put(sound)

    def _play(self) -> None:
        assert self._device is not None
        while (sound := self._waiting.get()) is not None:
            if not self._is_stopped.is_set():
                self._device.write(sound)
        if not self._is_stopped.is_set():
            self._device.close()

    def __enter__(self) -> Playing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._device is None:
            return
        try:
            if kind is None:
                self._waiting.put(None)
                self._plays.join()
        finally:
            if self._plays.is_alive():
                self._is_stopped.set()
                self._device.abort()
                self._waiting.put(None)
                self._plays.join()


def saved(folder: Path, sound: bytes, rate_hz: int) -> Path:
    """A new WAV in `folder`. Raises TerminalError."""
    number = 1
    while (path := folder / f"answer_{number}.wav").exists():
        number += 1
    try:
        path.write_bytes(wav_file(sound, rate_hz))
    except OSError as error:
        raise TerminalError(f"the sound {path} cannot be written ({error.strerror}); name another --save.") from None
    return path


def recorded(until: Callable[[], object]) -> bytes:
    """A WAV of what the microphone hears until `until` returns, at most `MOST_RECORDED_S`. Raises TerminalError."""
    library = _sounddevice()
    if library is None:
        raise TerminalError(
            "/mic needs the package sounddevice, which is not installed; install it, or attach a sound by /file PATH."
        )
    sound = bytearray()
    most_bytes = MOST_RECORDED_S * MICROPHONE_HZ * BYTES_A_SAMPLE

    def hear(data: Any, *_: object) -> None:
        sound.extend(bytes(data)[: most_bytes - len(sound)])

    try:
        with library.RawInputStream(samplerate=MICROPHONE_HZ, channels=1, dtype="int16", callback=hear):
            until()
    except library.PortAudioError as error:
        raise TerminalError(f"no microphone can be read ({error}); attach a sound by /file PATH.") from None
    return wav_file(bytes(sound), MICROPHONE_HZ)
