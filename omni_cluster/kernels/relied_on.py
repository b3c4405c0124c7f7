"""What the fused decoder uses of vLLM that vLLM does not promise to keep: part of `EngineTraits.relied_on`."""

from __future__ import annotations

from collections.abc import Mapping

DECODER: Mapping[str, tuple[str, ...]] = {
    "vllm.forward_context:ForwardContext": ("attn_metadata", "slot_mapping"),
    "vllm.forward_context:get_forward_context": (),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": (
        "block_table",
        "max_query_len",
        "seq_lens",
    ),
}
