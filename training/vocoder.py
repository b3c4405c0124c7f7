"""Trains the vocoder of code2wav: from mel frames to sound.

    python -m training.vocoder --data .cache/wave --out .cache/wave/vocoder.pt --minutes 12

At first by spectra alone, then by judges too, which learn beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from training.code2wav_parts import new_vocoder
from training.judges import Judges, judged_loss, judging_loss, spectral_loss
from training.mel import HOP, log_mel
from training.resume import Average, Training, falling
from training.wave_data import Sayings

HIGHEST_RATE = 1e-3
JUDGES_RATE = 3e-4
SPECTRAL = 7.5
"""Weight of the spectra beside the judges."""
CONTEXT_FRAMES = 8
"""At each end of a part of a sound: its mel frames are seen, its samples are not compared."""
ROUGHNESS = 0.05
"""Of the mel frames that it learns from: those of the flow are not exact."""


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


def train(
    sayings: Sayings,
    out: Path,
    minutes: float,
    at_most: float | None,
    batch: int,
    device: torch.device,
    frames: int = 64,
    judged_from: float = 0.3,
) -> None:
    """Prints the losses; `out` keeps the averaged weights as `average`. `judged_from`: the part without judges."""
    torch.manual_seed(0)
    vocoder, judges = new_vocoder().to(device), Judges().to(device)
    optimiser = torch.optim.AdamW(vocoder.parameters(), HIGHEST_RATE, betas=(0.8, 0.99), weight_decay=0.0)
    learning = torch.optim.AdamW(judges.parameters(), JUDGES_RATE, betas=(0.8, 0.99), weight_decay=0.0)
    average = Average(vocoder, 500)
    kept = {"model": vocoder, "optimiser": optimiser, "average": average, "judges": judges, "learning": learning}
    training = Training(out, kept, minutes, at_most)
    parts, inner = Parts(sayings, device, frames), slice(CONTEXT_FRAMES * HOP, -CONTEXT_FRAMES * HOP)
    for step in training.steps():
        real = parts.draw(batch)
        mel = log_mel(real)
        made = sound_of(vocoder, mel + ROUGHNESS * torch.randn_like(mel))[:, inner]
        real, judged = real[:, inner], training.progress >= judged_from
        if judged:
            told = judging_loss(judges(real), judges(made.detach()))
            _step(learning, told, JUDGES_RATE * (1 - training.progress) + 1e-6, judges)
        spectral = spectral_loss(made, real)
        loss = SPECTRAL * spectral + judged_loss(judges(real), judges(made)) if judged else spectral
        _step(optimiser, loss, falling(training.progress, HIGHEST_RATE), vocoder)
        average.update()
        if step % 50 == 0:
            print(f"vocoder step {step} progress {training.progress:.3f} spectral {float(spectral.detach()):.4f}"
                  + (f" judged {float((loss - SPECTRAL * spectral).detach()):.3f} judges {float(told.detach()):.3f}"
                     if judged else ""), flush=True)  # fmt: skip


def _step(optimiser: torch.optim.Optimizer, loss: torch.Tensor, rate: float, model: torch.nn.Module) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0 if isinstance(model, Judges) else 10.0)
    optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the vocoder of code2wav.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0, help="of training in all")
    parser.add_argument("--at-most", type=float, help="minutes of this run")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--frames", type=int, default=64, help="of each part of a batch")
    parser.add_argument("--judged-from", type=float, default=0.3, help="the part of the training without judges")
    parser.add_argument("--sayings", type=int, help="only the first so many")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train(
        Sayings.load(given.data, given.sayings), given.out, given.minutes, given.at_most, given.batch, device,
        given.frames, given.judged_from,
    )  # fmt: skip


if __name__ == "__main__":
    main()
