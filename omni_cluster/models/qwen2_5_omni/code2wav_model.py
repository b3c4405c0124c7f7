"""Codes to waveform: the DiT's flow and the vocoder, many requests in one pass, whole or piece by piece."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_cluster.config.precision import Precision
from omni_cluster.kernels import float8
from omni_cluster.models.precision import products_in, tensor_dtype
from omni_cluster.models.qwen2_5_omni.bigvgan import Vocoder
from omni_cluster.models.qwen2_5_omni.dit import BLOCK_ROWS, FIRST_SLOT, NO_BLOCK, BlockDiT
from omni_cluster.models.qwen2_5_omni.flow import Flow, FlowJob, evaluation_times, graph_sizes
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.models.qwen2_5_omni.vocoding import Vocoding
from omni_cluster.models.qwen2_5_omni.voices import Voice
from omni_cluster.models.sound import SoundJob, StepTime
from omni_cluster.models.step_clock import StepClock
from omni_cluster.models.to_host import values_of
from omni_cluster.types.errors import NotFinite, PayloadError

logger = logging.getLogger(__name__)

VOCODER_OVERLAP_FRAMES = 24
"""Mel frames before a piece that the vocoder sees again; what follows is the look-ahead's."""
FIRST = -1
"""Priority of the vocoder's stream: its kernels are small, and its sound is due before that of the flow's steps."""
RESIDENT_BLOCKS = 8
"""Beside all other stages on a card the layers of so many blocks at most are one kernel. Alone on a card a step takes
longer so; beside kernels of other stages, which each of its own would wait for, less."""
WIDE_DTYPE: Precision = "tfloat32"
"""What a second vocoder beside one in float16 computes in: as precise, without its bound."""
WIDE_FRAMES = (24, 400, 800, 1_500)
"""Passes that compile each tiling of its activations on a card."""


@dataclass(slots=True)
class StreamState:
    """What a stream keeps between its pieces.

    `slots` of the DiT's store: one holds the last block of the piece before, the other is for that of the piece that is
    made, so that a step that fails can be made again; a later piece is a step behind, and takes their places in turn.
    `noise` drawn for the look-ahead, `[frames, 80]`, which the next
    piece starts with; `mel` `[frames, 80]`: the last frames made.
    """

    slots: tuple[int, int]
    generator: torch.Generator
    noise: torch.Tensor
    mel: torch.Tensor | None = None
    is_begun: bool = False

    def turn_slots(self) -> None:
        """A piece is begun: the next one is behind it."""
        self.slots = self.slots[::-1]
        self.is_begun = True


@dataclass(slots=True)
class Piece:
    """A job while it is computed: its mel as far as the flow is, how many frames it has, and how many will be heard."""

    job: SoundJob
    stream: StreamState | None
    flow: FlowJob
    frames: int
    kept_frames: int

    @property
    def mel(self) -> torch.Tensor:
        return self.flow.state[: self.frames]


@dataclass(slots=True)
class VocoderPass:
    """Pieces on their way through the vocoder. It holds what the device reads, if their jobs are dropped meanwhile.

    `kept`: of each piece the mel that the vocoder sees before the stream's next one. It is copied in front of the
    sound, for which `finish` waits: the memory of a piece that is gone is the steps', which do not wait for the pass.
    `sound`: of those that are heard, joined, on the device; None where none is. `are_finite`: bool `[pieces]`, of what
    the vocoder sees, as a waveform does not tell of all that is clipped.
    """

    numbers: tuple[int, ...]
    pieces: list[Piece]
    windows: list[torch.Tensor]
    kept: list[torch.Tensor]
    sound: torch.Tensor | None
    are_finite: torch.Tensor

    @property
    def heard(self) -> list[int]:
        """Places of pieces that are heard."""
        return [i for i, piece in enumerate(self.pieces) if piece.job.is_heard]


class Code2WavModel:
    """A `SoundModel`: waveforms at 24 kHz, in the reference's arithmetic or in a faster one.

    Raises RuntimeError when more streams are begun than `max_streams`; the engine admits no more. A step or a finish
    that fails leaves all jobs and streams as they were before it.
    """

    def __init__(
        self,
        folder: Path,
        voices: dict[str, Voice],
        device: torch.device,
        config: Code2WavOptions | None = None,
        shares_card: bool = False,
    ) -> None:
        self._config = config or Code2WavOptions()
        self.steps = self._config.num_steps - 1
        # Beside the vocoder's kernels the one that has all layers would wait for its last parts, and hold the card.
        self.overlaps = device.type == "cuda" and not shares_card
        self._shares_card = shares_card
        self._device = device
        self._voices: dict[str | None, int] = {name: i for i, name in enumerate(voices)}
        self._load(load_token2wav(folder, device), list(voices.values()))
        self._clock = StepClock(device)
        self._vocoder_stream = torch.cuda.Stream(device, priority=FIRST) if self.overlaps else None
        self._pass: VocoderPass | None = None
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[str, StreamState] = {}
        self._has_warned = False
        slots = range(self._config.stream_slots)
        self._free_slots = list(zip(slots[::2], slots[1::2], strict=True))

    @torch.inference_mode()
    def _load(self, model: Qwen2_5OmniToken2WavModel, voices: list[Voice]) -> None:
        config, device = self._config, self._device
        captures = config.cuda_graphs and device.type == "cuda"
        times = evaluation_times(device, config.num_steps)
        dtype = tensor_dtype(config.dtype)
        in_float8 = config.dtype == "float8"
        if in_float8:
            float8.check_device(device)
        resident = RESIDENT_BLOCKS if self._shares_card and dtype.itemsize == 2 else 0  # the kernel knows no TF32
        with products_in("float32"):
            slots = config.stream_slots
            dit = BlockDiT(model.code2wav_dit_model, voices, times, dtype, slots, resident, in_float8)
        with products_in(config.dtype):
            sizes = graph_sizes(config.max_batch_frames // dit.block_size) if captures else ()
            self._flow = Flow(dit, device, sizes, config.num_steps)
        self._dit = dit
        with products_in(config.vocoder_dtype):
            vocoder = Vocoder(model.code2wav_bigvgan_model, device, tensor_dtype(config.vocoder_dtype))
            self._vocoding = Vocoding(vocoder, dit.mel_dim, device, captures, FIRST if self.overlaps else 0)
        self._wide_vocoding = self._wide(model, dit.mel_dim) if config.vocoder_dtype == "float16" else None
        self._samples_per_frame = math.prod(model.code2wav_bigvgan_model.config.upsample_rates)

    def _wide(self, model: Qwen2_5OmniToken2WavModel, mel_dim: int) -> Vocoding:
        """For what is past float16's range; seldom used, so without graphs, but with Triton's kernels compiled."""
        with products_in(WIDE_DTYPE):
            vocoder = Vocoder(model.code2wav_bigvgan_model, self._device, tensor_dtype(WIDE_DTYPE))
            wide = Vocoding(vocoder, mel_dim, self._device, captures=False)
            for frames in WIDE_FRAMES if self._device.type == "cuda" else ():
                wide([torch.zeros(frames, mel_dim, device=self._device)])
        return wide

    @torch.inference_mode()
    def begin(self, number: int, job: SoundJob) -> None:
        """See `SoundModel.begin`."""
        self._check(job)
        state = None if job.stream is None else self._streams.get(job.stream) or self._open(job.stream, job)
        frames = len(job.codes) * self._dit.repeats
        kept = frames - job.look_ahead * self._dit.repeats
        noise = self._noise(job, state, frames, kept)
        table = self._table(job, state, frames)
        if state is not None:
            state.turn_slots()
        padded = torch.zeros(table.shape[1], self._dit.block_size, self._dit.mel_dim)
        padded.flatten(0, 1)[:frames] = noise
        self._pieces[number] = Piece(job, state, self._flow.begin(padded, table), frames, kept)

    @torch.inference_mode()
    def step(self, numbers: Sequence[int], ending: Sequence[int] = ()) -> StepTime | None:
        """See `SoundModel.step`. The vocoder has a stream of its own on a card, which waits for the steps before."""
        if ending:
            self._pass = self._begin_pass(ending)
        pieces = [self._pieces[number] for number in numbers]
        with products_in(self._config.dtype), self._clock.measured(sum(piece.job.size for piece in pieces)):
            self._flow.advance([piece.flow for piece in pieces])
        return self._clock.latest()

    @torch.inference_mode()
    def finish(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """See `SoundModel.finish`: `[480 * codes]` without those of the look-ahead, float32 in [-1, 1]."""
        begun, self._pass = self._pass, None
        if begun is None or begun.numbers != tuple(numbers):
            begun = self._begin_pass(numbers)
        with torch.cuda.stream(self._vocoder_stream):
            waves = self._waves(begun)
        for piece, mel in zip(begun.pieces, begun.kept, strict=True):  # nothing fails from here on
            if piece.stream is not None:
                piece.stream.mel = mel
        self.drop(numbers)
        return waves

    def drop(self, numbers: Sequence[int]) -> None:
        """See `SoundModel.drop`."""
        for number in numbers:
            self._pieces.pop(number, None)

    def forget(self, streams: Sequence[str]) -> None:
        """See `SoundModel.forget`."""
        for name in streams:
            state = self._streams.pop(name, None)
            if state is not None:
                self._free_slots.append(state.slots)

    def _check(self, job: SoundJob) -> None:
        """Raises PayloadError: on a device, an index behind a table's end is the end of all that runs there."""
        if job.codes.shape[1:] != (1,):
            raise PayloadError(f"A job has codes of the shape {job.codes.shape}; they are [n, 1].")
        wrong = job.codes[(job.codes < 0) | (job.codes >= self._dit.num_codes)]
        if len(wrong):
            raise PayloadError(f"A job has the code {wrong[0]}; codes are from 0 to {self._dit.num_codes - 1}.")
        if job.voice not in self._voices:
            raise PayloadError(f"A job has the voice {job.voice!r}; voices are {', '.join(map(str, self._voices))}.")

    def _noise(self, job: SoundJob, state: StreamState | None, frames: int, kept: int) -> torch.Tensor:
        if state is None:
            return self._draw(generator_of(job), frames)
        noise = torch.cat([state.noise, self._draw(state.generator, frames - state.noise.shape[0])])
        state.noise = noise[kept:]
        return noise

    def _open(self, name: str, first: SoundJob) -> StreamState:
        """A stream that begins in the midst of its request draws the noise of what is before it, and drops it."""
        if not self._free_slots:
            raise RuntimeError(f"{len(self._streams)} streams are open, which is the limit.")
        generator = generator_of(first)
        self._draw(generator, first.samples.start // self._samples_per_frame)
        state = StreamState(self._free_slots.pop(), generator, torch.empty(0, self._dit.mel_dim))
        self._streams[name] = state
        return state

    def _draw(self, generator: torch.Generator, frames: int) -> torch.Tensor:
        """Noise `[frames, 80]`, drawn on the host so that a seed means the same on every device.

        The reference draws all frames at once. Piece by piece the generator gives the same numbers, as it makes them
        sixteen at a time and a frame has a multiple of that.
        """
        return torch.randn([frames, self._dit.mel_dim], generator=generator)

    def _table(self, job: SoundJob, state: StreamState | None, frames: int) -> np.ndarray:
        """A job's blocks in a row; see `FlowJob`. A stream's first block sees the one kept, its last heard is kept."""
        size, codes_per_block = self._dit.block_size, self._codes_per_block
        blocks = -(-frames // size)
        table = np.zeros((BLOCK_ROWS + codes_per_block, blocks), np.int32)
        previous, following, length, keep, voice, _ = table[:BLOCK_ROWS]
        place = np.arange(blocks)
        previous[:], following[:], keep[:] = place - 1, place + 1, NO_BLOCK
        following[-1] = NO_BLOCK
        length[:] = np.minimum(frames - place * size, size)
        voice[:] = self._voices[job.voice]
        codes = np.zeros(blocks * codes_per_block, np.int32)
        codes[: len(job.codes)] = job.codes[:, 0]
        table[BLOCK_ROWS:] = codes.reshape(blocks, codes_per_block).T
        if state is not None and state.is_begun:
            previous[0] = FIRST_SLOT - state.slots[0]
        if state is not None and job.look_ahead:
            keep[(len(job.codes) - job.look_ahead) // codes_per_block - 1] = state.slots[1]
        return table

    @property
    def _codes_per_block(self) -> int:
        return int(self._dit.block_size // self._dit.repeats)

    def _begin_pass(self, numbers: Sequence[int]) -> VocoderPass:
        """On a card it runs beside the steps that are begun later, in a stream that has waited for those before."""
        pieces = [self._pieces[number] for number in numbers]
        if self._vocoder_stream is not None:
            self._vocoder_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._vocoder_stream), products_in(self._config.vocoder_dtype):
            windows = [self._window(piece) for piece in pieces]
            kept = [self._kept_mel(piece, window) for piece, window in zip(pieces, windows, strict=True)]
            are_finite = torch.stack([window.sum().isfinite() for window in windows])
            begun = VocoderPass(tuple(numbers), pieces, windows, kept, None, are_finite)
            heard = begun.heard
            begun.sound = self._vocode([pieces[i] for i in heard], [windows[i] for i in heard]) if heard else None
        return begun

    def _vocode(self, pieces: Sequence[Piece], windows: Sequence[torch.Tensor]) -> torch.Tensor:
        return _heard_of(self._vocoding, pieces, windows)

    def _waves(self, begun: VocoderPass) -> list[np.ndarray]:
        """Waits for the device. Silence for pieces that are not heard. Raises NotFinite."""
        waves = [np.zeros(piece.kept_frames * self._samples_per_frame, np.float32) for piece in begun.pieces]
        if begun.sound is not None:
            _replace(waves, begun.heard, begun.sound)
        if self._wide_vocoding is not None:
            self._make_again_past_range(self._wide_vocoding, waves, begun)
        if not (bool(begun.are_finite.all()) and all(np.isfinite(wave).all() for wave in waves)):
            raise NotFinite("sound was computed that is infinite or no number; send the request with another seed.")
        return waves

    def _make_again_past_range(self, wide: Vocoding, waves: list[np.ndarray], begun: VocoderPass) -> None:
        """What an activation past float16's range has touched is not a number in the waveform: that is made again."""
        past = [i for i, wave in enumerate(waves) if not np.isfinite(wave).all()]
        if not past:
            return
        self._warn_of_range()
        with products_in(WIDE_DTYPE):
            sound = _heard_of(wide, [begun.pieces[i] for i in past], [begun.windows[i] for i in past])
        _replace(waves, past, sound)

    def _warn_of_range(self) -> None:
        if not self._has_warned:
            logger.warning("Sound past the range of float16 is made again in %s; this is said once.", WIDE_DTYPE)
        self._has_warned = True

    def _window(self, piece: Piece) -> torch.Tensor:
        """What the vocoder sees of a piece: the frames before it, its own, and the look-ahead's."""
        if piece.stream is None or piece.stream.mel is None:
            return piece.mel
        return torch.cat([piece.stream.mel, piece.mel])

    @staticmethod
    def _kept_mel(piece: Piece, window: torch.Tensor) -> torch.Tensor:
        """The last heard frames, which the vocoder sees before the stream's next piece."""
        kept = len(window) - (piece.frames - piece.kept_frames)
        return window[max(0, kept - VOCODER_OVERLAP_FRAMES) : kept].clone()


def generator_of(job: SoundJob) -> torch.Generator:
    """What the noise of a request is drawn from. Raises PayloadError for a job without a seed."""
    if job.seed is None:
        raise PayloadError("A job has no seed, which its noise is drawn from.")
    return torch.Generator().manual_seed(job.seed)


def _heard_of(vocoding: Vocoding, pieces: Sequence[Piece], windows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces' own waveforms, joined, of windows that have what is before and behind them too."""
    heard = []
    for wave, window, piece in zip(vocoding(windows), windows, pieces, strict=True):
        per_frame, start = len(wave) // len(window), len(window) - piece.frames
        heard.append(wave[start * per_frame : (start + piece.kept_frames) * per_frame])
    return torch.cat(heard)


def _replace(waves: list[np.ndarray], places: Sequence[int], sound: torch.Tensor) -> None:
    """Puts joined waveforms, on a device, in those places. Waits for the device, in one copy."""
    ends = np.cumsum([len(waves[i]) for i in places])[:-1]
    for i, wave in zip(places, np.split(values_of(sound), ends), strict=True):
        waves[i] = wave
