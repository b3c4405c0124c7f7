"""The layers of a Qwen2 decoder as the fused kernels of `decoder_kernels` compute them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton

from omni_cluster.kernels.decoder_kernels import (
    MAX_REQUESTS,
    NUM_COUNTERS,
    Weight,
    attend,
    can_overlap,
    linear_add,
    norm_gate_up,
    norm_linear,
    rotary_of_step,
)
from omni_cluster.kernels.float8 import VALUES


class FusedDecoder:
    """The layers and the final norm of a decoder for a step of one token a request.

    `layers`: vLLM's `LlamaDecoderLayer`s or `Qwen2DecoderLayer`s, with M-RoPE, weights of bfloat16 or of e4m3 with a
    scale a tensor or a feature, an unquantized bfloat16 cache and no tensor parallelism.
    """

    def __init__(self, layers: Iterable[Any], norm: Any) -> None:
        self._layers, self._norm = list(layers), norm
        device = self._layers[0].input_layernorm.weight.device
        self._counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)

    def fits(self, hidden: torch.Tensor) -> bool:
        """Whether vLLM's current step, with `hidden` `[n, width]`, is one that `__call__` computes."""
        if not (hidden.is_cuda and hidden.dtype == torch.bfloat16 and hidden.shape[0] <= MAX_REQUESTS):
            return False
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        return isinstance(metadata, dict) and all(
            _is_plain(layer, hidden) and _is_one_token_each(metadata[layer.self_attn.attn.layer_name], hidden.shape[0])
            for layer in self._layers
        )

    def __call__(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`positions` `[3, n]`, `hidden` `[n, width]` -> `[n, width]` after the final norm, in vLLM's current step."""
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        return self.decode(positions, hidden, context.attn_metadata, context.slot_mapping)

    def decode(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        metadata: Mapping[str, Any],
        slot_mapping: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As `__call__`, with what vLLM's forward context holds by layer name."""
        rotary, overlap = self._layers[0].self_attn.rotary_emb, can_overlap(hidden)
        angles = rotary_of_step(positions, rotary.cos_sin_cache, rotary.mrope_section, hidden.dtype, overlap=overlap)
        for layer in self._layers:
            name = layer.self_attn.attn.layer_name
            hidden = self._attention(layer, hidden, angles, metadata[name], slot_mapping[name], overlap)
            hidden = self._mlp(layer, hidden, overlap)
        return self._norm(hidden)

    def _attention(
        self,
        layer: Any,
        residual: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        metadata: Any,
        slots: torch.Tensor,
        overlap: bool,
    ) -> torch.Tensor:
        attention, norm, counters = layer.self_attn, layer.input_layernorm, self._counters
        projection, cache, scale = attention.qkv_proj, attention.attn.kv_cache, attention.scaling
        qkv = norm_linear(
            residual, norm.weight, norm.variance_epsilon, weight_of(projection), projection.bias, overlap=overlap
        )
        table, lengths = metadata.block_table, metadata.seq_lens
        attended = attend(qkv, *angles, cache, table, lengths, slots, scale, counters, overlap=overlap)
        return linear_add(attended, weight_of(attention.o_proj), residual, counters, overlap=overlap)

    def _mlp(self, layer: Any, residual: torch.Tensor, overlap: bool) -> torch.Tensor:
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        gate_up = weight_of(mlp.gate_up_proj)
        gated = norm_gate_up(residual, norm.weight, norm.variance_epsilon, gate_up, overlap=overlap)
        return linear_add(gated, weight_of(mlp.down_proj), residual, self._counters, overlap=overlap)


def weight_of(projection: Any) -> Weight:
    """Of a projection of vLLM's, which keeps e4m3 as `[width, features]`."""
    if projection.weight.dtype == VALUES:
        return Weight(projection.weight.t(), projection.weight_scale)
    return Weight(projection.weight)


def _is_plain(layer: Any, hidden: torch.Tensor) -> bool:
    """Unsharded, with weights that the kernels read, M-RoPE over whole heads and nothing else in between."""
    from vllm.model_executor.layers.linear import LinearBase

    attention, mlp, rotary = layer.self_attn, layer.mlp, layer.self_attn.rotary_emb
    projections = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    head_dim = attention.head_dim
    return (
        all(isinstance(p, LinearBase) and p.tp_size == 1 for p in projections)  # a LoRA's would be no LinearBase
        and all(_is_read(p, hidden.dtype) for p in projections)
        and not getattr(attention, "qk_norm", False)
        and attention.qkv_proj.bias is not None
        and all(p.bias is None for p in projections[1:])
        and attention.attn.kv_cache.dtype == hidden.dtype
        and attention.attn.sliding_window is None
        and bool(getattr(rotary, "mrope_section", None))
        and rotary.is_neox_style
        and not rotary.mrope_interleaved
        and rotary.rotary_dim == head_dim
        and head_dim >= 32
        and triton.next_power_of_2(head_dim) == head_dim
    )


def _is_read(projection: Any, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute with its weight."""
    kept = getattr(projection, "weight", None)  # other quantizations, such as AWQ, have none
    if kept is None or kept.dtype == dtype:
        return kept is not None and kept.is_contiguous()
    if kept.dtype != VALUES or not hasattr(projection, "weight_scale"):  # as scales of blocks are named
        return False
    values, scales = weight_of(projection)
    size = projection.output_size, projection.input_size  # a kernel of vLLM's may have padded the weight
    return values.is_contiguous() and values.shape == size and scales is not None and scales.numel() in (1, size[0])


def _is_one_token_each(metadata: Any, num_rows: int) -> bool:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    return (
        isinstance(metadata, FlashAttentionMetadata)
        and metadata.max_query_len == 1
        and metadata.seq_lens.shape[0] == num_rows
    )
