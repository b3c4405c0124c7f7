"""Mel windows of many jobs through the vocoder, in few passes and, on CUDA, by captured graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool, size_at_least
from omni_cluster.models.qwen2_5_omni.bigvgan import Vocoder
from omni_cluster.models.qwen2_5_omni.flow import on_device

GRAPH_FRAMES = (72, 96, 144, 240, 432)
"""Window lengths to capture: the context of both sides and 1, 2, 4, 8 or 16 blocks."""
GRAPH_BATCHES = (1, 2, 4, 8, 16)
GRAPH_MAX_FRAMES = 1_280
"""Frames of a captured batch at most: a larger one keeps the device busy without a graph."""
LARGE_PASS_FRAMES = 3_456
"""Frames of a larger pass of streams at most, which takes some 40 ms alone on a card."""
MAX_PASS_FRAMES = 16_384
"""Frames of a pass of whole answers at most: activations take some 200 KiB a frame in float32."""


class VocoderInputs:
    """A batch that stays where it is: mels `[B, n, 80]`, and the frames of each that are there."""

    def __init__(self, batch: int, frames: int, mel_dim: int, device: torch.device) -> None:
        self.mels = torch.zeros(batch, frames, mel_dim, device=device)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)

    def fill(self, windows: Sequence[torch.Tensor], lengths: torch.Tensor) -> None:
        padded = pad_sequence(list(windows), batch_first=True)
        self.mels[: padded.shape[0], : padded.shape[1]].copy_(padded)
        self.lengths[: len(windows)].copy_(lengths)


class Vocoding:
    """Waveforms of windows of any lengths. Windows of similar lengths share a pass.

    On CUDA every pass of a stream's windows has a shape that was run as this was made: the first pass of a shape may
    have kernels to load and to compile, and all streams would stand still meanwhile. `priority`: see `CapturedWork`.
    """

    def __init__(self, vocoder: Vocoder, mel_dim: int, device: torch.device, captures: bool, priority: int = 0) -> None:
        self._vocoder = vocoder
        self._mel_dim = mel_dim
        self._device = device
        self._priority = priority
        pool = GraphPool() if captures else None
        sizes = sorted(graph_sizes(), key=lambda size: -size[0] * size[1])
        self._graphs = {size: self._capture(*size, pool) for size in sizes if pool is not None}
        self._fills = captures
        if captures:
            self._run_once(large_sizes())

    def __call__(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Windows `[frames, 80]` -> waveforms float32 `[240 * frames]` on the device."""
        waves: list[torch.Tensor] = [torch.empty(0)] * len(windows)
        for group in groups([len(window) for window in windows]):
            for i, wave in zip(group, self._vocode([windows[i] for i in group]), strict=True):
                waves[i] = wave
        return waves

    def _vocode(self, windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        counts = [len(window) for window in windows]
        lengths = on_device(torch.tensor(counts, dtype=torch.int32), self._device)
        work = self._graph_for(len(windows), max(counts))
        if work is None:
            mels = self._filled(pad_sequence(list(windows), batch_first=True))
            waves = self._vocoder(mels, lengths)
            per_frame = waves.shape[1] // mels.shape[1]
        else:
            work.inputs.fill(windows, lengths)
            waves = work.replay()
            per_frame = waves.shape[1] // work.inputs.mels.shape[1]
        return [wave[: count * per_frame].clone() for wave, count in zip(waves, counts, strict=False)]

    def _filled(self, mels: torch.Tensor) -> torch.Tensor:
        """Mels `[B, n, 80]` filled up to a length that was run before. A whole answer may have any, so none was."""
        frames = size_at_least(mels.shape[1], GRAPH_FRAMES) if self._fills else None
        return mels if frames is None else pad(mels, (0, 0, 0, frames - mels.shape[1]))

    def _run_once(self, sizes: Iterable[tuple[int, int]]) -> None:
        for batch, frames in sizes:
            inputs = VocoderInputs(batch, frames, self._mel_dim, self._device)
            self._vocoder(inputs.mels, inputs.lengths)

    def _graph_for(self, batch: int, frames: int) -> CapturedWork[VocoderInputs, torch.Tensor] | None:
        size = (size_at_least(batch, GRAPH_BATCHES), size_at_least(frames, GRAPH_FRAMES))
        return self._graphs.get(size)  # type: ignore[arg-type]

    def _capture(self, batch: int, frames: int, pool: GraphPool) -> CapturedWork[VocoderInputs, torch.Tensor]:
        inputs = VocoderInputs(batch, frames, self._mel_dim, self._device)
        return CapturedWork(inputs, lambda: self._vocoder(inputs.mels, inputs.lengths), pool, self._priority)


def graph_sizes() -> list[tuple[int, int]]:
    """Batches and frames of the passes to capture."""
    return [(b, n) for b in GRAPH_BATCHES for n in GRAPH_FRAMES if b * n <= GRAPH_MAX_FRAMES]


def large_sizes() -> list[tuple[int, int]]:
    """Batches and frames of larger passes of streams."""
    return [(b, n) for b in GRAPH_BATCHES for n in GRAPH_FRAMES if GRAPH_MAX_FRAMES < b * n <= LARGE_PASS_FRAMES]


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Places of windows that share a pass: those of one captured length, or longer ones of about one length."""
    by_size: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        size = size_at_least(length, GRAPH_FRAMES) or 1 << (length - 1).bit_length()
        by_size.setdefault(size, []).append(place)
    return [batch for size, places in by_size.items() for batch in _batches(places, size)]


def _batches(places: list[int], frames: int) -> Iterable[list[int]]:
    while places:
        count = _pass_size(len(places), frames)
        yield places[:count]
        places = places[count:]


def _pass_size(windows: int, frames: int) -> int:
    """How many of the windows, of about so many frames, the next pass takes."""
    if frames not in GRAPH_FRAMES:
        return min(windows, max(1, MAX_PASS_FRAMES // frames))
    if (size_at_least(windows, GRAPH_BATCHES), frames) in graph_sizes():
        return windows
    return max(batch for batch in GRAPH_BATCHES if batch <= windows and batch * frames <= LARGE_PASS_FRAMES)
