"""Codes to waveform: the DiT's flow and the vocoder, many requests in one pass, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_cluster.config.schema import DiffusionConfig
from omni_cluster.errors import PayloadError
from omni_cluster.models.family import DiffusionJob
from omni_cluster.models.precision import products_in, tensor_dtype
from omni_cluster.models.qwen2_5_omni.bigvgan import Vocoder
from omni_cluster.models.qwen2_5_omni.dit import FIRST_SLOT, NO_BLOCK, BlockDiT, PackedBlocks
from omni_cluster.models.qwen2_5_omni.flow import Flow, evaluation_times, graph_sizes
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.models.qwen2_5_omni.vocoding import Vocoding
from omni_cluster.models.qwen2_5_omni.voices import Voice

SAMPLE_RATE_HZ = 24_000
VOCODER_OVERLAP_FRAMES = 24
"""Mel frames before a piece that the vocoder sees again; what follows is the look-ahead's."""


@dataclass(slots=True)
class StreamState:
    """What a stream keeps between its pieces: never changed once the piece is made, but replaced.

    `slot` of the DiT's store, None while nothing is kept there; `noise` drawn for the look-ahead, `[frames, 80]`, which
    the next piece starts with; `mel` `[frames, 80]`: the last frames made.
    """

    slot: int | None
    generator: torch.Generator
    noise: torch.Tensor
    mel: torch.Tensor | None = None


@dataclass(slots=True)
class Piece:
    """A job while it is computed: its noise `[frames, 80]` on the host, and where its blocks are in the batch.

    `before`, `after`: of a stream, what was kept before this piece, and what will be once all of the batch is made.
    """

    job: DiffusionJob
    noise: torch.Tensor
    kept_frames: int
    before: StreamState | None = None
    after: StreamState | None = None
    first_block: int = 0
    blocks: int = 0


@dataclass(slots=True)
class BlockTable:
    """The indices of `PackedBlocks`, block by block, as they are laid out."""

    previous: list[int] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    voice: list[int] = field(default_factory=list)

    def to_device(self, codes: torch.Tensor, device: torch.device) -> PackedBlocks:
        rows = torch.tensor([self.previous, self.following, self.length, self.keep, self.voice], dtype=torch.int32)
        previous, following, length, keep, voice = rows.to(device)
        return PackedBlocks(previous, following, length, keep, voice, codes.to(device))


class Code2WavModel:
    """A `DiffusionModel`: waveforms at 24 kHz, in the reference's arithmetic or in a faster one.

    Raises RuntimeError when more streams are begun than `max_streams`; the engine admits no more. A batch that fails
    leaves all streams as they were before it.
    """

    sample_rate_hz = SAMPLE_RATE_HZ

    def __init__(
        self,
        folder: Path,
        voices: dict[str, Voice],
        device: torch.device,
        config: DiffusionConfig | None = None,
    ) -> None:
        self._config = config or DiffusionConfig()
        self._device = device
        self._voices = {name: i for i, name in enumerate(voices)}
        self._load(load_token2wav(folder, device), list(voices.values()))
        self._streams: dict[str, StreamState] = {}
        self._free_slots = list(range(self._config.stream_slots))

    @torch.inference_mode()
    def _load(self, model: Qwen2_5OmniToken2WavModel, voices: list[Voice]) -> None:
        config, device = self._config, self._device
        captures = config.cuda_graphs and device.type == "cuda"
        times = evaluation_times(device)
        with products_in("float32"):
            dit = BlockDiT(model.code2wav_dit_model, voices, times, tensor_dtype(config.dtype), config.stream_slots)
        with products_in(config.dtype):
            sizes = graph_sizes(config.max_batch_frames // dit.block_size) if captures else ()
            self._flow = Flow(dit, device, sizes)
        self._dit = dit
        with products_in(config.vocoder_dtype):
            vocoder = Vocoder(model.code2wav_bigvgan_model, device, tensor_dtype(config.vocoder_dtype))
            self._vocoding = Vocoding(vocoder, dit.mel_dim, device, captures)

    @torch.inference_mode()
    def generate(self, jobs: Sequence[DiffusionJob]) -> list[np.ndarray]:
        """One waveform a job, `[480 * codes]` without those of the look-ahead, float32 in [-1, 1]."""
        for job in jobs:
            self._check_codes(job)
        pieces: list[Piece] = []
        try:
            pieces.extend(map(self._begin, jobs))
            with products_in(self._config.dtype):
                mels = self._sample_mels(pieces)
            with products_in(self._config.vocoder_dtype):
                waves = self._vocode(pieces, mels)
        except BaseException:
            for piece in pieces:
                self._free_slot(piece.after, piece.before)
            raise
        for piece in pieces:
            self._commit(piece)
        return waves

    def _check_codes(self, job: DiffusionJob) -> None:
        """Raises PayloadError: on a device, an index behind a table's end is the end of all that runs there."""
        wrong = next((code for code in job.codes if not 0 <= code < self._dit.num_codes), None)
        if wrong is not None:
            raise PayloadError(f"A job has the code {wrong}; codes are from 0 to {self._dit.num_codes - 1}.")

    def _commit(self, piece: Piece) -> None:
        if piece.job.stream is not None and piece.after is not None:
            self._streams[piece.job.stream] = piece.after
            self._free_slot(piece.before, piece.after)

    def _free_slot(self, unused: StreamState | None, used: StreamState | None) -> None:
        if unused is not None and unused.slot is not None and (used is None or unused.slot != used.slot):
            self._free_slots.append(unused.slot)

    def forget(self, streams: Sequence[str]) -> None:
        """See `DiffusionModel.forget`."""
        for name in streams:
            self._free_slot(self._streams.pop(name, None), None)

    def _begin(self, job: DiffusionJob) -> Piece:
        frames = len(job.codes) * self._dit.repeats
        kept = frames - job.look_ahead * self._dit.repeats
        if job.stream is None:
            return Piece(job, self._draw(torch.Generator().manual_seed(job.seed), frames), kept)
        before = self._streams.get(job.stream) or self._opened(job.seed)
        generator = torch.Generator()
        generator.set_state(before.generator.get_state())
        noise = torch.cat([before.noise, self._draw(generator, frames - before.noise.shape[0])])
        slot = self._free_slots.pop() if job.look_ahead else before.slot
        return Piece(job, noise, kept, before, StreamState(slot, generator, noise[kept:]))

    def _opened(self, seed: int) -> StreamState:
        if len(self._streams) >= self._config.max_streams or not self._free_slots:
            raise RuntimeError(f"{len(self._streams)} streams are open, which is all there is room for.")
        return StreamState(None, torch.Generator().manual_seed(seed), torch.empty(0, self._dit.mel_dim))

    def _draw(self, generator: torch.Generator, frames: int) -> torch.Tensor:
        """Noise `[frames, 80]`, drawn on the host so that a seed means the same on every device.

        The reference draws all frames at once. Piece by piece the generator gives the same numbers, as it makes them
        sixteen at a time and a frame has a multiple of that.
        """
        return torch.randn([frames, self._dit.mel_dim], generator=generator)

    def _sample_mels(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Mel frames `[frames, 80]` of each piece, the look-ahead's among them."""
        blocks = self._lay_out(pieces)
        size = self._dit.block_size
        noise = torch.zeros(blocks.length.shape[0], size, self._dit.mel_dim)
        for piece in pieces:
            noise[piece.first_block : piece.first_block + piece.blocks].flatten(0, 1)[: len(piece.noise)] = piece.noise
        mels = self._flow.solve(noise.to(self._device), blocks)
        return [mels[p.first_block : p.first_block + p.blocks].flatten(0, 1)[: len(p.noise)] for p in pieces]

    def _lay_out(self, pieces: Sequence[Piece]) -> PackedBlocks:
        table, codes = BlockTable(), []
        for piece in pieces:
            piece.first_block = len(table.length)
            self._add_blocks(piece, table)
            piece.blocks = len(table.length) - piece.first_block
            missing = piece.blocks * self._codes_per_block - len(piece.job.codes)
            codes += [*piece.job.codes, *[0] * missing]
        return table.to_device(torch.tensor(codes).view(-1, self._codes_per_block), self._device)

    def _add_blocks(self, piece: Piece, table: BlockTable) -> None:
        size, frames = self._dit.block_size, len(piece.noise)
        first, count = len(table.length), -(-frames // size)
        kept_slot = piece.before.slot if piece.before is not None else None
        table.previous += [NO_BLOCK if kept_slot is None else FIRST_SLOT - kept_slot]
        table.previous += range(first, first + count - 1)
        table.following += [*range(first + 1, first + count), NO_BLOCK]
        table.length += [min(size, frames - i * size) for i in range(count)]
        table.voice += [self._voices[piece.job.voice]] * count
        keep = [NO_BLOCK] * count
        if piece.after is not None and piece.after.slot is not None and piece.job.look_ahead:
            keep[piece.kept_frames // size - 1] = piece.after.slot
        table.keep += keep

    @property
    def _codes_per_block(self) -> int:
        return int(self._dit.block_size // self._dit.repeats)

    def _vocode(self, pieces: Sequence[Piece], mels: Sequence[torch.Tensor]) -> list[np.ndarray]:
        windows = [self._window(piece, mel) for piece, mel in zip(pieces, mels, strict=True)]
        waves = self._vocoding(windows)
        heard = []
        for wave, window, piece, mel in zip(waves, windows, pieces, mels, strict=True):
            per_frame, start = len(wave) // len(window), len(window) - len(mel)
            heard.append(wave[start * per_frame : (start + piece.kept_frames) * per_frame])
        samples = torch.cat(heard).cpu().numpy()  # one copy, which waits for the device
        return list(np.split(samples, np.cumsum([len(wave) for wave in heard])[:-1]))

    def _window(self, piece: Piece, mel: torch.Tensor) -> torch.Tensor:
        """What the vocoder sees of a piece: the frames before it, its own, and the look-ahead's."""
        if piece.before is None or piece.after is None:
            return mel
        before = piece.before.mel
        window = mel if before is None else torch.cat([before, mel])
        kept = len(window) - (len(mel) - piece.kept_frames)
        piece.after.mel = window[max(0, kept - VOCODER_OVERLAP_FRAMES) : kept].clone()
        return window
