"""Noise that repeats: a function of a request's seed, of the token's number in its answer and of the token's id.

It depends on nothing else: not on the batch, a request's place in it, chunks of a prompt, a preemption or how many
tokens a step makes, and no generator has to be set back for a token that is not kept. So a request that goes on in
another engine draws what it would have drawn in its first one, if its tokens so far count as made there.

It is counted, not drawn one after another: as in SplitMix64, a start and a multiple of an odd constant are added and
mixed. The start is made of seed and number in the same way. The mixer is Doug Lea's, of the JDK's L64X128MixRandom.
The integers are the same on every device; the logarithm at the end is the device's own.
"""

from __future__ import annotations

import numpy as np
import torch

_STRIDE = 0x9E3779B97F4A7C15
_FACTOR = 0xDABA0B6EB09322E3
_HALF = torch.tensor(0.5, dtype=torch.float64, device="cpu")  # a kernel takes it as a number
_SCALE = 2.0**-64 * (1 - 2.0**-51)
"""Takes an int64 into [-0.5 + 2**-52, 0.5 - 2**-52]: noise is neither zero nor infinite."""


def state_of(seed: int) -> int:
    """What the noise of a request with `seed` starts from: close seeds have far ones, and no two the same."""
    return int(_mixed(np.array([(seed + _STRIDE) % 2**64], dtype=np.uint64))[0])


def token_keys(states: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """What the noise of each token starts from, int64 `[..., n]`, of `states` uint64 `[n]` and `indices` `[..., n]`."""
    return _mixed(states + indices.astype(np.uint64) * np.uint64(_STRIDE)).view(np.int64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    for _ in range(2):
        numbers = (numbers ^ (numbers >> np.uint64(32))) * np.uint64(_FACTOR)
    return numbers ^ (numbers >> np.uint64(32))


def exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise, float64 `[n, m]`, for the token ids `[n, m]` that a token with one of `keys` `[n]` may be."""
    return torch.xlogy(-1.0, torch.add(_HALF, hashed(keys, ids), alpha=_SCALE))


def hashed(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Evenly spread int64 `[n, m]`, the high bits best: what a last step would mix into the low half stays away."""
    numbers = torch.add(keys.unsqueeze(1), ids, alpha=_signed(_STRIDE))
    # A shift of int64 would bring copies of its sign: the halves are there without one, the lower first.
    halves = numbers.view(torch.int32)
    low, high = halves[:, ::2], halves[:, 1::2]
    for _ in range(2):
        low.bitwise_xor_(high)
        numbers.mul_(_signed(_FACTOR))
    return numbers


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
