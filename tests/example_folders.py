"""The folders of `examples/`, and their programs run as their users run them."""

from __future__ import annotations

import asyncio
import os
import tempfile
import wave
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from tests.http_app import MODEL

EXAMPLES = Path(__file__).parents[1] / "examples"
SPEECH = EXAMPLES / "speech.wav"
RATE_HZ = 24_000
PATIENCE_S = 240
AUDIBLE = 100
"""Of 16-bit samples: the toy's voice is some thousands."""
_OURS = {"PYTHONPATH", "HF_HUB_OFFLINE", "RAY_ADDRESS"}


@dataclass(frozen=True)
class Program:
    """One that runs."""

    process: Process
    log: IO[bytes]

    async def line(self) -> str:
        """The next that it prints."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)).decode()

    async def ended(self) -> tuple[int, str, str]:
        """Its exit status, what else it printed, and what it printed as errors."""
        out, _ = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        self.log.seek(0)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), self.log.read().decode()


@asynccontextmanager
async def started(*command: str | Path, folder: Path, **variables: str) -> AsyncIterator[Program]:
    """A program that its user starts in a folder of theirs. It is ended with the block, unless it has ended."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    with tempfile.TemporaryFile() as log:  # a pipe that is not read would hold it up
        process = await asyncio.create_subprocess_exec(
            *map(str, command), cwd=folder, env=kept | {"MODEL": MODEL} | variables, stdout=PIPE, stderr=log
        )
        try:
            yield Program(process, log)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def ran(*command: str | Path, folder: Path, **variables: str) -> str:
    """What a program printed that did what it should."""
    async with started(*command, folder=folder, **variables) as program:
        status, out, err = await program.ended()
    assert status == 0, (out[-2000:], err[-4000:])
    return out


def kept_answer(folder: Path, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    """The sound that a program kept in `answer.wav`, which can be heard."""
    samples = samples_of(folder / "answer.wav", rate_hz)
    assert np.abs(samples.astype(int)).max() > AUDIBLE
    return samples


def samples_of(path: Path, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (rate_hz, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)
