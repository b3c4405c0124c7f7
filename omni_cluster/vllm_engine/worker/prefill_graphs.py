"""CUDA graphs of steps with prompts: without one the host launches a prompt's kernels for longer than they run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

CAPTURE_SIZES = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
"""Tokens of the steps that are captured. Steps of one token a request have graphs of their own, up to `max_num_seqs`. A
longer prompt keeps its device busy for longer than its host. A graph takes some 13 MB."""
HOST_BOUND_SIZES = [*CAPTURE_SIZES, *range(1152, 2049, 128)]
"""The same for a model of less work for each token: a small one, or one of experts, of which a token takes few."""
MAX_SPLITS = 8
"""Parts that FlashAttention cuts a head's keys into, at most, in a graph: it keeps a result in float32 of each part."""
ONE_GROUP_ROWS = 64
"""FlashAttention 3 takes other tiles for up to so many rows of a head's keys (`use_one_mma_wg` in its
hopper/tile_size.h). A graph keeps the tiles that it was captured with, and its plan must be made for the same ones."""


class PrefillGraphs:
    """The captured steps with prompts of one runner.

    `group_size`: query heads that share a head's keys. Attention is planned for `least_tokens` of a request at least.
    """

    def __init__(self, group_size: int) -> None:
        self.least_tokens = ONE_GROUP_ROWS // group_size + 1
        self._are_captured = False

    def plan(self, dispatcher: CudagraphDispatcher, sizes: Iterable[int]) -> None:
        """Has whole graphs captured for steps of so many tokens, in place of those between the attention layers.

        vLLM's own mode for it has no graphs for steps of one token a request beside them.
        """
        mode = dispatcher.cudagraph_mode
        if mode.decode_mode() != CUDAGraphMode.FULL or not mode.separate_routine():
            return
        dispatcher.cudagraph_keys[CUDAGraphMode.PIECEWISE].clear()
        for size in sizes:
            if size > 1:
                step = dispatcher._create_padded_batch_descriptor(size, uniform_decode=False, has_lora=False)
                dispatcher.add_cudagraph_key(CUDAGraphMode.FULL, step)
        self._are_captured = True

    def planned_tokens(self, most_tokens: int) -> int:
        """How many tokens of a request attention is planned for, where no request of the step has more than these.

        A short step takes the tiles of a long one, as its graph does.
        """
        return max(most_tokens, self.least_tokens) if self._are_captured and most_tokens > 1 else most_tokens


def can_capture_prefill(
    attention_backends: Iterable[Iterable[type[AttentionBackend]]], groups: Iterable[Any], vllm_config: VllmConfig
) -> bool:
    """Whether all attention of the model runs in a graph whatever a step has; FlashAttention 3 does."""
    return vllm_config.lora_config is None and all(
        _always(backend.get_builder_cls(), vllm_config, group.kv_cache_spec)
        for backends, group in zip(attention_backends, groups, strict=True)
        for backend in backends
    )


def _always(builder: type[AttentionMetadataBuilder[Any]], vllm_config: VllmConfig, kv_cache_spec: Any) -> bool:
    return builder.get_cudagraph_support(vllm_config, kv_cache_spec) == AttentionCGSupport.ALWAYS
