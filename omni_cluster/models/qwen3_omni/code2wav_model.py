"""The causal vocoder as the sound engine runs it: a part of a job takes one step, and has neither voice nor seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from omni_cluster.config.precision import Precision
from omni_cluster.models.precision import products_in, tensor_dtype
from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES
from omni_cluster.models.qwen3_omni.options import Code2WavOptions
from omni_cluster.models.qwen3_omni.vocoder import Vocoder, VocoderStream, load_vocoder
from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.models.step_clock import StepClock
from omni_cluster.models.to_host import values_of
from omni_cluster.types.errors import NotFinite


@dataclass(slots=True)
class Piece:
    """A job, and on the device the waves of those of its parts that are made."""

    job: SoundJob
    stream: VocoderStream
    waves: list[torch.Tensor] = field(default_factory=list)

    @property
    def next_codes(self) -> np.ndarray:
        return self.job.codes[PASS_CODES * len(self.waves) :][:PASS_CODES]


def load_model(folder: Path, device: torch.device, options: Code2WavOptions) -> Code2WavModel:
    captures = options.cuda_graphs and device.type == "cuda"
    with products_in(options.dtype):
        vocoder = load_vocoder(folder, device, tensor_dtype(options.dtype), captures)
    return Code2WavModel(vocoder, device, options.dtype)


class Code2WavModel:
    """A `SoundModel`: waveforms at 24 kHz, piece by piece what one decode of all codes gives.

    A stream of a request that is begun again starts with the request's first code: what a code leaves in those behind
    it does not fade within the bound of what a stream keeps, and making it again takes little.
    """

    overlaps = False
    steps = 1

    def __init__(self, vocoder: Vocoder, device: torch.device, precision: Precision = "float32") -> None:
        """`precision`: of the vocoder's products; those of float32 weights are rounded in tfloat32."""
        self._vocoder, self._precision = vocoder, precision
        self._clock = StepClock(device)
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[str, VocoderStream] = {}

    def begin(self, number: int, job: SoundJob) -> None:
        """See `SoundModel.begin`."""
        self._vocoder.check(job.codes)
        self._pieces[number] = Piece(job, self._stream(job))

    def _stream(self, job: SoundJob) -> VocoderStream:
        if job.stream is None:
            return self._vocoder.stream()
        if job.stream not in self._streams:
            self._streams[job.stream] = self._vocoder.stream()
        return self._streams[job.stream]

    def step(self, numbers: Sequence[int], ending: Sequence[int] = ()) -> StepTime | None:
        """See `SoundModel.step`."""
        pieces = [self._pieces[number] for number in numbers]
        with products_in(self._precision), self._clock.measured(sum(piece.job.size for piece in pieces)):
            waves = self._vocoder.take([piece.stream for piece in pieces], [piece.next_codes for piece in pieces])
        for piece, wave in zip(pieces, waves, strict=True):
            piece.waves.append(wave)
        return self._clock.latest()

    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """See `SoundModel.finish`."""
        pieces = [self._pieces[number] for number in numbers]
        waves = [wave for piece in pieces for wave in piece.waves]
        samples = values_of(torch.cat(waves).float())  # one copy, which waits for the device
        if not np.isfinite(samples).all():
            raise NotFinite("sound was computed that is infinite or no number; send the request with another seed.")
        self.drop(numbers)
        return list(np.split(samples, np.cumsum([sum(map(len, piece.waves)) for piece in pieces])[:-1]))

    def drop(self, numbers: Sequence[int]) -> None:
        """See `SoundModel.drop`."""
        for number in numbers:
            self._pieces.pop(number, None)

    def forget(self, streams: Sequence[str]) -> None:
        """See `SoundModel.forget`."""
        for name in streams:
            self._streams.pop(name, None)
