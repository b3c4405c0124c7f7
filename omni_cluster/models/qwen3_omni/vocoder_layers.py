"""The layers of code2wav: a transformer that makes a row of each code, and convolutions that make sound of the rows.

Products are of the weights' dtype. Norms, and the angles by which queries and keys are turned, are in float32 whatever
that is: in bfloat16 they differ from code to code, and noise grows with a request's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavRMSNorm,
    Qwen3OmniMoeCode2WavTransformerLayer,
    Qwen3OmniMoeRMSNorm,
    Qwen3OmniMoeSnakeBeta,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the queries of a pass are given: the turns of their positions, float32 `[B, 1, n, head_dim]` each, and which
    of the kept codes and of their own piece they see, bool `[B, 1, n, window - 1 + n]`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor

    def turned(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries or keys `[B, heads, n, head_dim]`, in float32 until they are turned."""
        first, second = heads.chunk(2, -1)
        turned = heads * self.cos + torch.cat([-second, first], -1) * self.sin
        return turned.to(heads.dtype)


class Layer(nn.Module):
    """One of the transformer's, with its products of one input joined."""

    def __init__(self, layer: Qwen3OmniMoeCode2WavTransformerLayer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.scale = attention.head_dim, attention.scaling
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.out, self.out_scale = attention.o_proj, layer.self_attn_layer_scale.scale
        self.gate_up, self.activation = joined([mlp.gate_proj, mlp.up_proj]), mlp.act_fn
        self.down, self.down_scale = mlp.down_proj, layer.mlp_layer_scale.scale
        self.norm, self.mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)

    def forward(self, rows: torch.Tensor, kept: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, n, hidden]`, and keys and values `[B, 2, kv_heads, window - 1 + n, head_dim]`: `kept`, then new."""
        parts = self.qkv(self.norm(rows)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries, keys, values = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        both = torch.cat([kept, torch.stack([seen.turned(keys), values], 1)], 3)
        attended = F.scaled_dot_product_attention(
            seen.turned(queries), both[:, 0], both[:, 1], attn_mask=seen.mask, scale=self.scale,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        rows = torch.addcmul(rows, self.out_scale, self.out(attended.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.mlp_norm(rows)).chunk(2, -1)
        return torch.addcmul(rows, self.down_scale, self.down(self.activation(gate) * up)), both


def joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """The outputs of several layers of one input, side by side."""
    weight = torch.cat([layer.weight for layer in layers])
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        made.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return made


class Norm(nn.Module):
    """Root mean square; its variance is in float32 at least."""

    def __init__(self, norm: Qwen3OmniMoeCode2WavRMSNorm | Qwen3OmniMoeRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, self.weight.shape, self.weight, self.eps)


class CodeRows(nn.Module):
    """The transformer, from codes of several codebooks to rows."""

    offsets: torch.Tensor

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        self.window = model.config.sliding_window
        self.embedding = model.code_embedding
        layers = [Layer(layer) for layer in model.pre_transformer.layers]
        self.layers = nn.ModuleList(layers)
        self.kept_shape = (len(layers), 2, layers[0].kv_heads, self.window - 1, layers[0].head_dim)
        self.norm = Norm(model.pre_transformer.norm)
        self.register_buffer("offsets", model.code_offset.flatten(), persistent=False)
        # No buffer: a module that is cast to another dtype casts its buffers.
        self.frequencies: torch.Tensor = model.pre_transformer.rotary_emb.inv_freq.float()

    def forward(
        self, codes: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Codes `[B, n, Q]` behind `counts` `[B]` others, of which there are `kept` `[B, layers, 2, ...]` keys and
        values: their rows `[B, n, hidden]`, and the keys and values of each layer, as `Layer` gives them.
        """
        rows, seen, both = self.embedding(codes + self.offsets).mean(2), self._seen(counts, codes.shape[1]), []
        for number, layer in enumerate(self.layers):
            rows, of_layer = layer(rows, kept[:, number], seen)
            both.append(of_layer)
        return self.norm(rows), both

    def _seen(self, counts: torch.Tensor, length: int) -> Seen:
        seeing = torch.arange(length, device=counts.device)[:, None]
        seen = torch.arange(1 - self.window, length, device=counts.device)
        is_near = (seen <= seeing) & (seeing - seen < self.window)
        is_there = counts[:, None] + seen >= 0
        angles = (counts[:, None] + seeing[:, 0])[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        return Seen(angles.cos(), angles.sin(), (is_near & is_there[:, None])[:, None])


class Snake(nn.Module):
    """x + sin(x * e^alpha)^2 / e^beta, with the powers taken once."""

    def __init__(self, snake: Qwen3OmniMoeSnakeBeta) -> None:
        super().__init__()
        self.rate = nn.Parameter(snake.alpha.exp()[:, None], requires_grad=False)
        self.gain = nn.Parameter(1 / (snake.beta.exp()[:, None] + snake.no_div_by_zero), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(hidden, self.gain, (hidden * self.rate).sin_().square_())


class RowsWave(nn.Module):
    """The convolutions, from rows to sound."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(block for blocks in model.upsample for block in blocks), *model.decoder])
        with_own_snakes(self.blocks)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[B, n, hidden]` -> waves `[B, samples]` in [-1, 1]."""
        hidden = rows.transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden[:, 0].clamp(-1, 1)


def with_own_snakes(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, Qwen3OmniMoeSnakeBeta):
            setattr(module, name, Snake(child))
        else:
            with_own_snakes(child)
