"""Trains the vocoder of code2wav: from mel frames to sound.

    python -m training.vocoder --out .cache/wave --minutes 12

At first by spectra alone, then by discriminators too, which learn beside it. `--init` begins with the weights of an
earlier training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from training.average import Average
from training.code2wav_parts import VOCODER_PREFIX, new_vocoder, weights
from training.discriminators import Discriminators, adversarial_loss, discriminator_loss, spectral_loss
from training.mel import HOP, log_mel
from training.run import Plan, Run, descend, given_options, run_options
from training.wave_data import Sayings

DISCRIMINATORS_RATE = 3e-4
SPECTRAL = 7.5
"""Weight of the spectra beside the discriminators."""
CONTEXT_FRAMES = 8
"""At each end of a part of a sound: its mel frames are seen, its samples are not compared."""
ROUGHNESS = 0.05
"""Of the mel frames that it learns from: those of the flow are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderPlan(Plan):
    """`out` has the sentences, too. `batch`: parts of sounds of a step, each of so many `frames`.

    `adversarial_from`: the part of the training without discriminators. `rate`: the highest one. `init`: a folder
    whose weights are begun with.
    """

    batch: int = 32
    frames: int = 64
    adversarial_from: float = 0.3
    rate: float = 1e-3
    init: Path | None = None


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
    hidden = vocoder.conv_pre(vocoder.process_mel_spectrogram(mel.transpose(1, 2)))
    count = vocoder.num_residual_blocks
    for stage in range(vocoder.num_upsample_layers):
        hidden = vocoder.ups[stage][0](hidden)
        hidden = sum(block(hidden) for block in vocoder.resblocks[stage * count : (stage + 1) * count]) / count
    return vocoder.conv_post(vocoder.activation_post(hidden))[:, 0]


def train(plan: VocoderPlan, sayings: Sayings) -> None:
    torch.manual_seed(plan.seed)
    device = torch.device(plan.device)
    vocoder, discriminators = new_vocoder().to(device), Discriminators().to(device)
    if plan.init is not None:
        vocoder.load_state_dict(weights(plan.init, VOCODER_PREFIX))
    optimizer = torch.optim.AdamW(vocoder.parameters(), plan.rate, betas=(0.8, 0.99), weight_decay=0.0)
    learning = torch.optim.AdamW(discriminators.parameters(), DISCRIMINATORS_RATE, betas=(0.8, 0.99), weight_decay=0.0)
    average = Average(vocoder, 500)
    kept = {"model": vocoder, "optimizer": optimizer, "average": average}
    run = Run("vocoder", plan, {**kept, "discriminators": discriminators, "learning": learning})
    parts, inner = Parts(sayings, device, plan.frames), slice(CONTEXT_FRAMES * HOP, -CONTEXT_FRAMES * HOP)
    for _ in run.steps():
        real, rate = parts.draw(plan.batch), run.rate(plan.rate)
        mel = log_mel(real)
        made, real = sound_of(vocoder, mel + ROUGHNESS * torch.randn_like(mel))[:, inner], real[:, inner]
        loss = spectral = spectral_loss(made, real)
        if run.progress >= plan.adversarial_from:
            told = discriminator_loss(discriminators(real), discriminators(made.detach()))
            descend(learning, [told], DISCRIMINATORS_RATE * (1 - run.progress) + 1e-6, longest=100.0)
            adversarial = adversarial_loss(discriminators(real), discriminators(made))
            loss = SPECTRAL * spectral + adversarial
            run.tell(adversarial=adversarial, discriminators=told)
        descend(optimizer, [loss], rate, longest=10.0)
        average.update()
        run.tell(spectral=spectral, rate=rate)


def main() -> None:
    parser = run_options("Trains the vocoder of code2wav.")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--frames", type=int, help="of each part of a batch")
    parser.add_argument("--adversarial-from", type=float, help="the part of the training without discriminators")
    parser.add_argument("--rate", type=float, help="the highest one")
    parser.add_argument("--init", type=Path, help="a folder whose weights are begun with")
    plan = VocoderPlan(**given_options(parser))
    train(plan, Sayings.load(plan.out))


if __name__ == "__main__":
    main()
