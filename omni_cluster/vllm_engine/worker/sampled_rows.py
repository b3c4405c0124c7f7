"""What the host knows of the rows of a batch that is sampled from: all that decides how, so that nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from omni_cluster.vllm_engine.worker.seeded_noise import exponential, token_keys

MAX_K = 64
"""A top-k up to here is drawn among the few."""


@dataclass(frozen=True)
class SampledRows:
    """The rows of a batch, for all tokens that a step of its engine makes.

    `top_k` int `[n]`, the vocabulary's size for a row without; `top_p` float `[n]`; `greedy` bool `[n]`: rows whose
    draw nobody looks at; `seeded` bool `[n]`. `keys` int64 `[tokens + 1, n]` on the device, None where no row is
    seeded: what each token's noise starts from, and in the last row `seeded` once more.
    """

    top_k: np.ndarray
    top_p: np.ndarray
    greedy: np.ndarray
    seeded: np.ndarray
    keys: torch.Tensor | None

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
            return cls(*bounds, greedy, seeded, None)
        starts = np.array([state or 0 for state in states], dtype=np.uint64)
        keys = token_keys(starts, indices + np.arange(tokens)[:, None])
        return cls(*bounds, greedy, seeded, on_device(np.vstack([keys, seeded]), device))

    def at(self, places: np.ndarray | slice, places_on_device: torch.Tensor | slice) -> SampledRows:
        """The rows at `places` alone."""
        seeded = self.seeded[places]
        keys = self.keys[:, places_on_device] if self.keys is not None and seeded.any() else None
        return SampledRows(self.top_k[places], self.top_p[places], self.greedy[places], seeded, keys)

    @cached_property
    def few(self) -> np.ndarray:
        """Bool `[n]`: rows that draw among `MAX_K` tokens at most, and greedy ones, which may go along."""
        few = (self.top_k <= MAX_K) & ~self.greedy
        return few | self.greedy if few.any() else few

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
    def bounded(self) -> np.ndarray:
        """Bool, for each row that draws: whether its top-p leaves out anything."""
        return self.top_p[~self.greedy] < 1

    @cached_property
    def all_seeded(self) -> bool:
        return bool((self.seeded | self.greedy).all())

    def noise(self, ids: torch.Tensor, ahead: int) -> torch.Tensor:
        """Exponential noise for the token ids `[n, m]`, of a seeded row its own; `ahead`: which token of the step."""
        if self.keys is None:
            return torch.empty(ids.shape, device=ids.device).exponential_()
        repeatable = exponential(self.keys[ahead], ids)
        if self.all_seeded:
            return repeatable
        return torch.where(self.keys[-1].bool().unsqueeze(1), repeatable, torch.empty_like(repeatable).exponential_())


_NONE = np.zeros(0)
NO_ROWS = SampledRows(_NONE, _NONE, _NONE.astype(bool), _NONE.astype(bool), None)


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that nothing waits for."""
    on_host = torch.from_numpy(numbers)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
