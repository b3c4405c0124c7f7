"""Rotary embeddings of positions between whole ones.

vLLM's layers look angles up in a table of whole positions. Here the angles of a step are made once, of its positions,
into a static buffer, so that CUDA graphs replay them. Through layers that are compiled they go in place of positions;
other layers look them up, by one kernel of vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from omni_cluster.models.qwen3_omni.fine_positions import unpacked
from omni_cluster.types.errors import ConfigError


class Angles(nn.Module):
    """Cosines and sines of positions."""

    axes: torch.Tensor
    frequencies: torch.Tensor

    def __init__(self, config: Any) -> None:
        """`config`: the decoder's. ConfigError for frequencies that are scaled."""
        super().__init__()
        rope, width = config.rope_parameters, config.head_dim
        if rope["rope_type"] != "default":
            raise ConfigError(f"rope_type is {rope['rope_type']!r}, but Qwen3-Omni has no other than 'default'.")
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("frequencies", (1.0 / rope["rope_theta"] ** exponents)[:, None], persistent=False)
        self.register_buffer("axes", axes_in_turn(rope["mrope_section"]), persistent=False)

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """Of packed positions `[3, n]` float32 `[head_dim, n]`: the cosines of half a head, then the sines."""
        angles = unpacked(positions)[self.axes] * self.frequencies
        return torch.cat([angles.cos(), angles.sin()])


class StepRotation(Angles):
    """The angles of a step for layers that are compiled, in a buffer float32 `[head_dim, most_tokens + 1]`."""

    angles: torch.Tensor

    def __init__(self, config: Any, most_tokens: int) -> None:
        super().__init__(config)
        width = config.head_dim
        # One more, or torch.compile would take the length of a row for that of the first step, which fills the buffer.
        self.register_buffer("angles", torch.zeros(width, most_tokens + 1, dtype=torch.float32), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Of packed positions `[3, n]` the angles `[head_dim, n]`, a part of the buffer."""
        made = self.angles[:, : positions.shape[1]]
        made.copy_(self.of(positions))
        return made


class StepTable(Angles):
    """The angles of a step for other layers: the table of `rotary`, their rotary embedding, with a row a token."""

    tokens: torch.Tensor

    def __init__(self, config: Any, most_tokens: int, dtype: torch.dtype) -> None:
        super().__init__(config)
        width = config.head_dim
        self.rotary = RotaryEmbedding(width, width, most_tokens, 1.0, True, dtype, init_cache=False)
        table = torch.zeros(most_tokens, width, dtype=dtype)
        self.rotary.register_buffer("cos_sin_cache", table, persistent=False)
        self.register_buffer("tokens", torch.arange(most_tokens), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Fills the table for packed positions `[3, n]`; which row each token has, int64 `[n]`."""
        number = positions.shape[1]
        self.rotary.cos_sin_cache[:number].copy_(self.of(positions).t())
        return self.tokens[:number]


class Rotary(nn.Module):
    """A layer's rotary embedding, of angles that are made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, angles: torch.Tensor, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`heads`, queries and keys `[n, heads * head_dim]`, turned by `angles` `[head_dim, n]`."""
        cos, sin = angles.t()[:, None].to(heads[0].dtype).chunk(2, dim=-1)
        return tuple(self._turned(each, cos, sin) for each in heads)

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = heads.unflatten(-1, (-1, self._width)).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def axes_in_turn(sections: Sequence[int]) -> torch.Tensor:
    """By which axis, 0 for time, 1 for rows, 2 for columns, each frequency turns: in turn, as long as each has some."""
    axes = torch.zeros(sum(sections), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
