"""How a made sound differs from speech: by spectra of several resolutions, and by networks that learn to tell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import l1_loss, leaky_relu, pad
from torch.nn.utils.parametrizations import weight_norm

from training.mel import hann, log_mel

RESOLUTIONS = ((512, 120), (1024, 240), (2048, 480))
"""Windows of the spectra, and the samples from one to the next."""
PERIODS = (2, 3, 5, 7, 11)
SLOPE = 0.1
Features = list[torch.Tensor]


def magnitudes(sound: torch.Tensor, window: int, hop: int) -> torch.Tensor:
    """`[B, samples]` -> `[B, frequencies, frames]`."""
    spectrum = torch.stft(sound, window, hop, window, hann(window, sound.device), return_complex=True)
    return torch.view_as_real(spectrum).square().sum(-1).add(1e-9).sqrt()


def spectral_loss(made: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Of sounds `[B, samples]`: how far mel frames, magnitudes and their logarithms are apart."""
    loss = 2 * l1_loss(log_mel(made), log_mel(real))
    for window, hop in RESOLUTIONS:
        a, b = magnitudes(made, window, hop), magnitudes(real, window, hop)
        loss = loss + (a - b).norm() / b.norm() + l1_loss(a.clamp(min=1e-3).log(), b.clamp(min=1e-3).log())
    return loss


class PeriodDiscriminator(nn.Module):
    """Sees every `period`-th sample together."""

    def __init__(self, period: int, channels: int = 16) -> None:
        super().__init__()
        self._period = period
        widths = (1, channels, 2 * channels, 4 * channels, 8 * channels)
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in itertools.pairwise(widths)
        )
        self.last = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), 1, (1, 0)))

    def forward(self, sound: torch.Tensor) -> Features:
        """The opinion is the last one."""
        sound = pad(sound[:, None], (0, -sound.shape[1] % self._period), mode="reflect")
        return _features(sound.unflatten(2, (-1, self._period)), self.layers, self.last)


class SpectrumDiscriminator(nn.Module):
    """Sees magnitudes of one resolution."""

    def __init__(self, window: int, hop: int, channels: int = 16) -> None:
        super().__init__()
        self._window, self._hop = window, hop
        strides = ((1, 1), (2, 1), (2, 1), (2, 1))
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(1 if i == 0 else channels, channels, (9, 3), stride, (4, 1)))
            for i, stride in enumerate(strides)
        )
        self.last = weight_norm(nn.Conv2d(channels, 1, 3, 1, 1))

    def forward(self, sound: torch.Tensor) -> Features:
        spectrum = magnitudes(sound, self._window, self._hop).clamp(min=1e-4).log()
        return _features(spectrum[:, None], self.layers, self.last)


class Discriminators(nn.Module):
    """All of them; gives each one's features, its opinion the last."""

    def __init__(self) -> None:
        super().__init__()
        of_spectra = (SpectrumDiscriminator(*resolution) for resolution in RESOLUTIONS)
        self.each = nn.ModuleList([*map(PeriodDiscriminator, PERIODS), *of_spectra])

    def forward(self, sound: torch.Tensor) -> list[Features]:
        return [discriminator(sound) for discriminator in self.each]


def _features(hidden: torch.Tensor, layers: nn.ModuleList, last: nn.Module) -> Features:
    found = []
    for layer in layers:
        hidden = leaky_relu(layer(hidden), SLOPE)
        found.append(hidden)
    return [*found, last(hidden)]


def discriminator_loss(of_real: Sequence[Features], of_made: Sequence[Features]) -> torch.Tensor:
    """What the discriminators learn by: 1 for speech, 0 for what was made."""
    return torch.stack([
        (1 - real[-1]).square().mean() + made[-1].square().mean()
        for real, made in zip(of_real, of_made, strict=True)
    ]).sum()  # fmt: skip


def adversarial_loss(of_real: Sequence[Features], of_made: Sequence[Features]) -> torch.Tensor:
    """What the vocoder learns by: to be taken for speech, and to look like it inside the discriminators."""
    losses = []
    for real, made in zip(of_real, of_made, strict=True):
        losses.append((1 - made[-1]).square().mean())
        losses += [2 * l1_loss(m, r.detach()) for m, r in zip(made[:-1], real[:-1], strict=True)]
    return torch.stack(losses).sum()
