"""`python -m tests.training.interpreted_snake`: the vocoder with kernels of its activations, as Triton interprets them.

Triton decides where a kernel runs when it is imported, so this is a process of its own. Prints how far the sound and
all gradients are from those of transformers' modules, as parts of their largest value.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from training import snake
from training.code2wav_parts import new_vocoder
from training.vocoder import sound_of


def differences() -> list[float]:
    torch.manual_seed(0)
    vocoder, mel = new_vocoder(), 2 * torch.randn(2, 2, 80) - 5
    for name, parameter in vocoder.named_parameters():
        if name.endswith((".alpha", ".beta")):
            torch.nn.init.normal_(parameter, 0, 0.3)
    names = list(vocoder.state_dict())

    def made() -> dict[str, torch.Tensor]:
        vocoder.zero_grad()
        sound = sound_of(vocoder, mel)
        (sound * torch.arange(sound.numel()).sin().view_as(sound)).sum().backward()
        return {"sound": sound.detach(), **{name: each.grad.clone() for name, each in vocoder.named_parameters()}}

    plain = made()
    snake.BLOCK = 512  # several programs a row
    snake.use_kernels(vocoder)
    if list(vocoder.state_dict()) != names:
        raise SystemExit("the weights have other names")
    return [float((each - plain[name]).abs().max() / plain[name].abs().max()) for name, each in made().items()]


if __name__ == "__main__":
    print(*differences())
