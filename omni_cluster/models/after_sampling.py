"""A model of several codes a position: the engine samples the first one, and the model makes the residual ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

NO_CODE = -1
"""Of a position without residual codes, as those of a prompt are."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that a step has sampled of each of its `n` requests, on the device.

    `hidden` `[n, H]`: what `compute_logits` was given. `token_ids` int `[n]`. `greedy` bool `[n]`: requests that take
    the likeliest code. `keys` int64 `[n]`: what the noise of a request's codes starts from, see
    `seeded_noise.exponential`; ids below the size of the vocabulary give the noise of the token itself.
    """

    hidden: torch.Tensor
    token_ids: torch.Tensor
    greedy: torch.Tensor
    keys: torch.Tensor


class AfterSampling(Protocol):
    """What a model has beside vLLM's interface if its stage `has_residual_codes`.

    The next position's input is made of these codes, in `forward`. It must hang on the token and its codes alone: they
    are all that is kept of a request that was preempted, or lost with its engine.

    A model may have `capture_after_sampling(sizes)`, which makes CUDA graphs of `after_sampling` for so many requests.
    It is called once, when the weights are loaded and before memory is measured.
    """

    residual_codes: torch.Tensor
    """A buffer int16 `[max_num_batched_tokens, Q - 1]` of one address: before a step the engine writes the residual
    codes of the token at each of its positions there, `NO_CODE` where it has none."""

    def after_sampling(self, sampled: Sampled) -> torch.Tensor:
        """The residual codes of the tokens, int16 `[n, Q - 1]`; those of a request hang on no other one.

        A step may have tokens that are dropped, and their codes with them.
        """
