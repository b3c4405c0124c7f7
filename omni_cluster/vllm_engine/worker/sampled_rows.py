"""What the host knows of the rows of a batch that is sampled from: all that decides how, so that nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from omni_cluster.models.seeded_noise import exponential, token_keys

MAX_K = 64
"""A top-k up to here is drawn among the few."""


@dataclass(frozen=True)
class SampledRows:
    """The rows of a batch, for all tokens that a step of its engine makes.

    `top_k` int `[n]`, the vocabulary's size for a row without; `top_p` float `[n]`; `greedy` bool `[n]`: rows whose
    draw is not used; `seeded` bool `[n]`. On the device: `keys` int64 `[tokens, n]`, what the noise of each token
    starts from, None where no row is seeded; `mixed` bool `[n, 1]`, which rows are seeded, None where all or none are.
    """

    top_k: np.ndarray
    top_p: np.ndarray
    greedy: np.ndarray
    seeded: np.ndarray
    keys: torch.Tensor | None = None
    mixed: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        bounds: tuple[np.ndarray, np.ndarray],
        greedy: np.ndarray,
        states: Sequence[int | None],
        indices: np.ndarray,
        tokens: int,
        device: torch.device,
    ) -> SampledRows:
        """Rows with top-k and top-p as `bounds`.

        `states`: of a row's seed, None without; `indices` int `[n]`: which of its request's tokens a row makes first.
        """
        seeded = np.array([state is not None for state in states], dtype=bool) & ~greedy
        if not seeded.any():
            return cls(*bounds, greedy, seeded)
        starts = np.array([state or 0 for state in states], dtype=np.uint64)
        keys = token_keys(starts, indices + np.arange(tokens)[:, None])
        if (seeded | greedy).all():
            return cls(*bounds, greedy, seeded, on_device(keys, device))
        packed = on_device(np.vstack([keys, seeded]), device)
        return cls(*bounds, greedy, seeded, packed[:-1], packed[-1].bool().unsqueeze(1))

    def at(self, places: np.ndarray | slice, places_on_device: torch.Tensor | slice) -> SampledRows:
        """The rows at `places` alone."""
        greedy, seeded = self.greedy[places], self.seeded[places]
        some = SampledRows(self.top_k[places], self.top_p[places], greedy, seeded)
        if self.keys is None or not seeded.any():
            return some
        keys = self.keys[:, places_on_device]
        if self.mixed is None or (seeded | greedy).all():
            return replace(some, keys=keys)
        return replace(some, keys=keys, mixed=self.mixed[places_on_device])

    @cached_property
    def few(self) -> np.ndarray:
        """Bool `[n]`: rows that draw among `MAX_K` tokens at most, and greedy ones, which may go along."""
        few = (self.top_k <= MAX_K) & ~self.greedy
        return few | self.greedy if few.any() else few

    @cached_property
    def all_few(self) -> bool:
        return bool(self.few.all())

    @cached_property
    def alone(self) -> list[int]:
        """Seeded rows that draw from the whole vocabulary."""
        return np.flatnonzero(self.seeded & ~self.few).tolist()  # type: ignore[no-any-return]

    @cached_property
    def top_k_of_all(self) -> int | None:
        """The top-k of each row that draws, where all have the same."""
        ks = self.top_k[~self.greedy]
        return int(ks[0]) if (ks == ks[0]).all() else None

    @cached_property
    def bounded(self) -> frozenset[bool]:
        """Whether a top-p leaves out anything, of the rows that draw."""
        return frozenset((self.top_p[~self.greedy] < 1).tolist())

    def keys_of(self, ahead: int, device: torch.device) -> torch.Tensor:
        """What noise for more codes starts from, int64 `[n]`: of a row without a seed it is drawn."""
        if self.keys is not None and self.mixed is None:
            return self.keys[ahead]
        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, self.greedy.shape, device=device)
        if self.keys is None or self.mixed is None:
            return drawn
        return torch.where(self.mixed.squeeze(1), self.keys[ahead], drawn)

    def noise(self, ids: torch.Tensor, ahead: int) -> torch.Tensor:
        """Exponential noise for the token ids `[n, m]`, of a seeded row its own; `ahead`: which token of the step."""
        if self.keys is None:
            return torch.empty(ids.shape, device=ids.device).exponential_()
        repeatable = exponential(self.keys[ahead], ids)
        if self.mixed is None:
            return repeatable
        return torch.where(self.mixed, repeatable, torch.empty_like(repeatable).exponential_())


_NONE = np.zeros(0)
NO_ROWS = SampledRows(_NONE, _NONE, _NONE.astype(bool), _NONE.astype(bool))


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that nothing waits for."""
    on_host = torch.from_numpy(numbers)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
