"""The code predictor: of a token that the talker has sampled, the residual codes of its frame, one after another.

A small causal decoder with positions of its own. The first pass reads the talker's hidden state and the first code,
each further one the code before it. The passes of a batch, sampling among them, decide nothing on the host, and their
shapes hang on the number of requests alone, so that a CUDA graph can hold all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional

from omni_cluster.models.after_sampling import NO_CODE
from omni_cluster.models.seeded_noise import exponential

TOP_K, TOP_P = 50, 0.8
"""transformers' own, whatever the talker samples by."""

_TABLE, _HEAD, _LAYER = "model.codec_embedding.", "lm_head.", "model.layers."


class Given(NamedTuple):
    """What codes are made of: the talker's `hidden` and the embeddings `first` of its tokens, `[n, H]` each. `greedy`
    and `keys`: see `Sampled`.
    """

    hidden: torch.Tensor
    first: torch.Tensor
    greedy: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def room(cls, requests: int, like: torch.Tensor) -> Given:
        """Zeros for so many requests, of `like`'s width, dtype and device."""
        states = like.new_zeros(2, requests, like.shape[-1])
        greedy, keys = (like.new_zeros(requests, dtype=dtype) for dtype in (torch.bool, torch.int64))
        return cls(states[0], states[1], greedy, keys)

    def first_of(self, requests: int) -> Given:
        """Those of the first requests, in the same memory."""
        return Given(*(each[:requests] for each in self))


class CodePredictor(nn.Module):
    """Computes what transformers' `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` generates.

    `first_noise_id`: of the noise that codes are drawn by; smaller ids are the talker's own.
    """

    turns: torch.Tensor
    """Cosines and sines of the positions, float32 `[2, Q, D / 2]`."""

    def __init__(self, config: Any, first_noise_id: int) -> None:
        super().__init__()
        self.residual, self.num_codes = config.num_code_groups - 1, config.vocab_size
        self._first_noise_id = first_noise_id
        self.tables = _parameter(self.residual, self.num_codes, config.hidden_size)
        self.heads = _parameter(self.residual, self.num_codes, config.hidden_size)
        self.layers = nn.ModuleList(PredictorLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = _parameter(config.hidden_size)
        self.eps = config.rms_norm_eps
        steps = torch.arange(0, config.head_dim, 2, device="cpu", dtype=torch.float32) / config.head_dim
        angles = torch.arange(self.residual + 1, device="cpu")[:, None] / config.rope_parameters["rope_theta"] ** steps
        turns = torch.stack([angles.cos(), angles.sin()])
        self.register_buffer("turns", turns.to(self.norm.device), persistent=False)

    def forward(
        self, hidden: torch.Tensor, first: torch.Tensor, greedy: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Of the talker's `hidden` and the embeddings of its tokens, `[n, H]` each, codes int64 `[n, Q - 1]`.

        `greedy` and `keys`: see `Sampled`.
        """
        entering, codes = torch.stack([hidden, first], dim=1), list[torch.Tensor]()
        noise = self.noise(keys).unbind(1)
        kept = [layer.room(len(hidden), self.residual + 1) for layer in self.parts]
        for number in range(self.residual):
            start = number + 1 if number else 0
            state = self._state(entering, start, kept)
            logits = functional.linear(state, self.heads[number]).float()
            codes.append(drawn(logits, greedy, noise[number]))
            entering = functional.embedding(codes[-1], self.tables[number]).unsqueeze(1)
        return torch.stack(codes, dim=1)

    def embedded(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of the embeddings of `codes` int16 `[n, Q - 1]`, of a row of `NO_CODE` zero: `[n, H]`."""
        starts = torch.arange(0, self.residual * self.num_codes, self.num_codes, device=codes.device)
        weights = (codes != NO_CODE).to(self.tables.dtype)
        return functional.embedding_bag(
            codes.clamp(min=0) + starts, self.tables.flatten(0, 1), mode="sum", per_sample_weights=weights
        )

    @property
    def parts(self) -> Sequence[PredictorLayer]:
        return cast(Sequence[PredictorLayer], self.layers)

    def _state(self, entering: torch.Tensor, start: int, kept: list[torch.Tensor]) -> torch.Tensor:
        """What the next code is told from, `[n, H]`, of inputs `[n, m, H]` at the positions from `start` on."""
        turns = self.turns[:, start : start + entering.shape[1]]
        for layer, own in zip(self.parts, kept, strict=True):
            entering = layer(entering, turns, start, own)
        return normed(entering[:, -1], self.norm, self.eps)

    def noise(self, keys: torch.Tensor) -> torch.Tensor:
        """For each code of each codebook, `[n, Q - 1, codes]`: of all at once, which takes few kernels."""
        ids = torch.arange(self.residual * self.num_codes, device=keys.device) + self._first_noise_id
        return exponential(keys, ids.expand(len(keys), -1)).unflatten(1, (self.residual, self.num_codes))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Of the checkpoint's names without their prefix. Returns the names of its own that were loaded."""
        given = dict(weights)
        for mine, prefix in ((self.tables, _TABLE), (self.heads, _HEAD)):
            for number in range(self.residual):
                mine.data[number].copy_(given[f"{prefix}{number}.weight"])
        self.norm.data.copy_(given["model.norm.weight"])
        for number, layer in enumerate(self.parts):
            prefix = f"{_LAYER}{number}."
            layer.load({name.removeprefix(prefix): each for name, each in given.items() if name.startswith(prefix)})
        return {name for name, _ in self.named_parameters()}


class PredictorLayer(nn.Module):
    """A layer of Qwen3: queries, keys and values are one product, and so are the two that enter the feed-forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        size, inner, turned = config.hidden_size, config.intermediate_size, self._heads + self._kv_heads
        self.before_attention, self.before_mlp = _parameter(size), _parameter(size)
        self.qkv = _parameter((turned + self._kv_heads) * self._head_dim, size)
        self.head_norms = _parameter(turned, self._head_dim)
        self.out = _parameter(size, self._heads * self._head_dim)
        self.gate_up, self.down = _parameter(2 * inner, size), _parameter(size, inner)

    def room(self, requests: int, positions: int) -> torch.Tensor:
        """For keys and values of a batch."""
        return self.qkv.new_empty(2, requests, self._kv_heads, positions, self._head_dim)

    def forward(self, entering: torch.Tensor, turns: torch.Tensor, start: int, kept: torch.Tensor) -> torch.Tensor:
        """Of `[n, m, H]` at the positions from `start` on, whose cosines and sines are `turns` `[2, m, D / 2]`."""
        attended = self._attended(normed(entering, self.before_attention, self._eps), turns, start, kept)
        state = entering + functional.linear(attended, self.out)
        gate, up = functional.linear(normed(state, self.before_mlp, self._eps), self.gate_up).chunk(2, dim=-1)
        return state + functional.linear(functional.silu(gate) * up, self.down)

    def _attended(self, state: torch.Tensor, turns: torch.Tensor, start: int, kept: torch.Tensor) -> torch.Tensor:
        n, m, end = len(state), state.shape[1], start + state.shape[1]
        heads = functional.linear(state, self.qkv).view(n, m, -1, self._head_dim)
        turned = self._heads + self._kv_heads
        query, key = (
            _turned(normed(heads[:, :, :turned], self.head_norms, self._eps), turns)
            .transpose(1, 2)
            .split([self._heads, self._kv_heads], dim=1)
        )
        kept[0, :, :, start:end] = key
        kept[1, :, :, start:end] = heads[:, :, turned:].transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            query, kept[0, :, :, :end], kept[1, :, :, :end], is_causal=m > 1, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(n, m, -1)

    def load(self, given: dict[str, torch.Tensor]) -> None:
        """Of the checkpoint's names in a layer."""
        attention = {name: given[f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
        norms = (given[f"self_attn.{name}_norm.weight"] for name in ("q", "k"))
        of_heads = zip(norms, (self._heads, self._kv_heads), strict=True)
        parts = {
            "before_attention": given["input_layernorm.weight"],
            "before_mlp": given["post_attention_layernorm.weight"],
            "qkv": torch.cat(list(attention.values())),
            "head_norms": torch.cat([norm.expand(count, -1) for norm, count in of_heads]),
            "out": given["self_attn.o_proj.weight"],
            "gate_up": torch.cat([given["mlp.gate_proj.weight"], given["mlp.up_proj.weight"]]),
            "down": given["mlp.down_proj.weight"],
        }
        for name, tensor in parts.items():
            self.get_parameter(name).data.copy_(tensor)


def drawn(logits: torch.Tensor, greedy: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A code of each request, int64 `[n]`, of float32 `logits` `[n, codes]` and exponential `noise` for each code.

    The likeliest for the `greedy`; for the others one of the `TOP_K` likeliest, and of the fewest of these that have
    `TOP_P` of their probability together. Codes are left out by their logits, so that equals share one fate.
    """
    best = logits.topk(min(TOP_K, logits.shape[1])).values
    shares = best.softmax(-1)
    least = best.masked_fill(shares.cumsum(-1) - shares >= TOP_P, float("inf")).amin(-1, keepdim=True)
    chances = logits.masked_fill(logits < least, float("-inf")).softmax(-1)
    return torch.where(greedy, logits.argmax(-1), (chances / noise).argmax(-1))


def normed(state: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm; the mean is taken in float32, or long sound turns to noise."""
    wide = state.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(state.dtype)


def _turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions of heads `[n, m, heads, D]`, in float32 as the norms are."""
    (first, second), (cos, sin) = heads.float().chunk(2, dim=-1), turns[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
