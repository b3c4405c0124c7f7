"""Trains the vocoder of code2wav: from mel frames to sound.

    python -m training.vocoder --out .cache/wave --minutes 12

At first by spectra alone, then by discriminators too, which learn beside it. `--init` begins with the weights of an
earlier training. On a card a step is a CUDA graph: it has thousands of kernels, most of them small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from omni_cluster.kernels.cuda_graphs import CapturedWork, GraphPool
from training.average import Average
from training.code2wav_parts import VOCODER_PREFIX, new_vocoder, weights
from training.discriminators import Discriminators, adversarial_loss, discriminator_loss, spectral_loss
from training.mel import HOP, log_mel
from training.run import Part, Plan, Run, descend, given_options, run_options
from training.wave_data import Sayings

DISCRIMINATORS_RATE = 3e-4
SPECTRAL = 7.5
"""Weight of the spectra beside the discriminators."""
CONTEXT_FRAMES = 8
"""At each end of a part of a sound: its mel frames are seen, its samples are not compared."""
LEAST_DECIBELS = -115
"""Of what the vocoder sees."""
ROUGHNESS = 0.05
"""Of the mel frames that it learns from: those of the flow are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderPlan(Plan):
    """`out` has the sentences, too. `batch`: parts of sounds of a step, each of so many `frames`.

    `adversarial_from`: the part of the training without discriminators. `rate`: the highest one. `init`: a folder
    whose weights are begun with. `eager`: on a card as on a CPU.
    """

    batch: int = 32
    frames: int = 64
    adversarial_from: float = 0.3
    rate: float = 1e-3
    init: Path | None = None
    eager: bool = False

    @property
    def on_card(self) -> bool:
        """With kernels of its own and CUDA graphs."""
        return torch.device(self.device).type == "cuda" and not self.eager


class Parts:
    """Random parts of all sounds, which lie on the device one behind the other."""

    def __init__(self, sayings: Sayings, device: torch.device, frames: int) -> None:
        sounds = [sound for of_voice in sayings.sounds for sound in of_voice]
        self._sound = torch.from_numpy(np.concatenate(sounds)).to(device)
        self._samples = (frames + 2 * CONTEXT_FRAMES) * HOP

    def draw(self, size: int) -> torch.Tensor:
        """Float32 `[B, samples]`."""
        starts = torch.randint(len(self._sound) - self._samples, (size, 1), device=self._sound.device)
        return self._sound[starts + torch.arange(self._samples, device=self._sound.device)].float() / 2**15


def sound_of(vocoder: Qwen2_5OmniToken2WavBigVGANModel, mel: torch.Tensor) -> torch.Tensor:
    """What its `forward` does, but on the mel's device: `[B, n, 80]` -> `[B, 240 n]`, not yet within -1 and 1."""
    hidden = vocoder.conv_pre(_loudness(vocoder, mel.transpose(1, 2)))
    count = vocoder.num_residual_blocks
    for stage in range(vocoder.num_upsample_layers):
        hidden = vocoder.ups[stage][0](hidden)
        hidden = sum(block(hidden) for block in vocoder.resblocks[stage * count : (stage + 1) * count]) / count
    return vocoder.conv_post(vocoder.activation_post(hidden))[:, 0]


def _loudness(vocoder: Qwen2_5OmniToken2WavBigVGANModel, mel: torch.Tensor) -> torch.Tensor:
    """Its `process_mel_spectrogram`, which brings a constant to the device: a capture must not."""
    decibels = 20 * mel.exp().clamp(min=10 ** (LEAST_DECIBELS / 20)).log10() - 20
    return vocoder.normalize_spectrogram(decibels, 1, LEAST_DECIBELS)


Told = dict[str, torch.Tensor]


class Learner:
    """What learns, and its two kinds of a step. Neither waits for the device, and their tensors stay where they are."""

    def __init__(self, plan: VocoderPlan, parts: Parts) -> None:
        device = torch.device(plan.device)
        self._parts, self._size = parts, plan.batch
        self._vocoder, self._discriminators = new_vocoder(), Discriminators().to(device)
        if plan.init is not None:
            self._vocoder.load_state_dict(weights(plan.init, VOCODER_PREFIX))
        self._vocoder.to(device)
        if plan.on_card:
            from training.snake import use_kernels  # the CPU has no kernels

            use_kernels(self._vocoder)
        self._optimizer, self._learning = _optimizer(self._vocoder), _optimizer(self._discriminators)
        self._average = Average(self._vocoder, 500)
        self.rate, self.discriminators_rate = torch.zeros(2, device=device).unbind()

    def kept(self) -> dict[str, Part]:
        """What a run goes on with."""
        return {
            "model": self._vocoder, "optimizer": self._optimizer, "average": self._average,
            "discriminators": self._discriminators, "learning": self._learning,
        }  # fmt: skip

    def spectral_step(self) -> Told:
        spectral = spectral_loss(*self._sounds())
        self._descend(spectral)
        return {"spectral": spectral.detach()}

    def adversarial_step(self) -> Told:
        made, real = self._sounds()
        judge = self._discriminators
        told = discriminator_loss(judge(real), judge(made.detach()))
        descend(self._learning, [told], self.discriminators_rate, longest=100.0)
        with torch.no_grad():
            of_real = judge(real)
        spectral, adversarial = spectral_loss(made, real), adversarial_loss(of_real, judge(made))
        self._descend(SPECTRAL * spectral + adversarial)
        return {"spectral": spectral.detach(), "adversarial": adversarial.detach(), "discriminators": told.detach()}

    def _sounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Made and real ones, without the context at their ends."""
        real = self._parts.draw(self._size)
        mel, inner = log_mel(real), slice(CONTEXT_FRAMES * HOP, -CONTEXT_FRAMES * HOP)
        return sound_of(self._vocoder, mel + ROUGHNESS * torch.randn_like(mel))[:, inner], real[:, inner]

    def _descend(self, loss: torch.Tensor) -> None:
        descend(self._optimizer, [loss], self.rate, longest=10.0)
        self._average.update()


def _optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99), weight_decay=0.0, fused=True, capturable=True)


class Captured:
    """A step as a CUDA graph. Its first call makes three steps: two of them warm up."""

    def __init__(self, step: Callable[[], Told], pool: GraphPool) -> None:
        self._step, self._pool = step, pool
        self._work: CapturedWork[None, Told] | None = None
        self._ended = torch.cuda.Event()

    def __call__(self) -> Told:
        if self._work is None:
            self._work = CapturedWork(None, self._step, self._pool)
        told = {name: value.clone() for name, value in self._work.replay().items()}  # the next replay writes there
        before, self._ended = self._ended, torch.cuda.Event()
        self._ended.record()
        before.synchronize()  # one step ahead of the card at most: the run's clock is the steps'
        return told


def train(plan: VocoderPlan, sayings: Sayings) -> None:
    torch.manual_seed(plan.seed)
    learner = Learner(plan, Parts(sayings, torch.device(plan.device), plan.frames))
    run = Run("vocoder", plan, learner.kept())
    by_spectra: Callable[[], Told] = learner.spectral_step
    by_all: Callable[[], Told] = learner.adversarial_step
    if plan.on_card:
        pool = GraphPool()
        by_spectra, by_all = Captured(by_spectra, pool), Captured(by_all, pool)
    for _ in run.steps():
        rate = run.rate(plan.rate)
        learner.rate.fill_(rate)
        learner.discriminators_rate.fill_(DISCRIMINATORS_RATE * (1 - run.progress) + 1e-6)
        told = by_all() if run.progress >= plan.adversarial_from else by_spectra()
        run.tell(**told, rate=rate)


def main() -> None:
    parser = run_options("Trains the vocoder of code2wav.")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--frames", type=int, help="of each part of a batch")
    parser.add_argument("--adversarial-from", type=float, help="the part of the training without discriminators")
    parser.add_argument("--rate", type=float, help="the highest one")
    parser.add_argument("--init", type=Path, help="a folder whose weights are begun with")
    parser.add_argument("--eager", action="store_true", help="on a card as on a CPU: without CUDA graphs")
    plan = VocoderPlan(**given_options(parser))
    train(plan, Sayings.load(plan.out))


if __name__ == "__main__":
    main()
