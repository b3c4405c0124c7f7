"""Noise that repeats: a function of a request's seed and of how many tokens it has made, and of nothing else.

A generator that goes on from draw to draw has to be set back for each token that is not kept: by a chunk of a prompt
that is not its last, a preemption, a step that is computed to no effect. vLLM sets CUDA generators back by their
offset, which those of a CPU do not have.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import torch


class SeededNoise:
    """Draws on one device; launches are in order, so that one generator serves all requests."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device)

    def drawn(self, seed: int, size: int) -> torch.Tensor:
        """Exponential noise, float32 `[size]`, the same for a seed each time."""
        self._generator.manual_seed(seed)
        return torch.empty(size, device=self._generator.device).exponential_(generator=self._generator)


def token_seed(seed: int, index: int) -> int:
    """The seed of the noise that a request's token `index` is drawn by; close seeds and indices give far ones.

    Its low 32 bits count alone on a CPU, so all bits of both go into them.
    """
    return int.from_bytes(blake2b(struct.pack("<Qq", seed % 2**64, index), digest_size=8).digest(), "little")
