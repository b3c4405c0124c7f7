"""The talker as a vLLM model: codec embedding plus rows, projected into a small Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, make_layers, maybe_prefix

from omni_cluster.kernels.decoder_kernels import MAX_REQUESTS
from omni_cluster.kernels.fused_decoder import FusedDecoder
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds

ARCHITECTURE = "Qwen2_5OmniTalker"
PREFIX = "talker."


class Qwen2_5OmniTalker(nn.Module, SupportsMRoPE):
    """Computes what transformers' `Qwen2_5OmniTalkerForConditionalGeneration` does.

    `extra_rows` `[max_num_batched_tokens, embedding_size]` is filled by the runner before a step and read in
    `forward`: one address for ever, so that CUDA graphs replay it.
    """

    extra_rows: torch.Tensor
    never_sampled: torch.Tensor

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.embed_tokens.": "embed_tokens.",
            "talker.codec_head.": "codec_head.",
            "talker.model.": "",
            "talker.": "",
        },
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        # vLLM's Qwen2 layer derives the head size from the hidden size, which is wrong here; Llama's honours
        # head_dim, and with these two flags it has Qwen2's biases.
        config.qkv_bias, config.attention_bias = True, False
        self._mask_id = config.tts_codec_mask_token_id
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.embedding_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)
        _, _, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: LlamaDecoderLayer(vllm_config=vllm_config, prefix=prefix, config=config),
            prefix=maybe_prefix(prefix, "layers"),
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._fused_decoder = FusedDecoder(self.layers, self.norm)
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        dtype = vllm_config.model_config.dtype
        self.register_buffer(
            "extra_rows", torch.zeros(num_tokens, config.embedding_size, dtype=dtype), persistent=False
        )
        self.register_buffer("never_sampled", never_sampled(config.vocab_size, config.special_ids), persistent=False)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """For requests that bring no positions of their own, such as vLLM's warm-up."""
        return torch.arange(len(input_tokens)).expand(3, -1).contiguous(), 0

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    @property
    def most_fused_requests(self) -> int:
        """Of a step that goes through kernels of this project."""
        return MAX_REQUESTS

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`input_ids` `[n]`, `positions` `[3, n]` -> hidden states `[n, hidden_size]`."""
        codec = self.embed_tokens(input_ids)
        # Prompt positions of the thinker carry its rows and no codec embedding.
        codec = torch.where((input_ids == self._mask_id).unsqueeze(-1), 0, codec)
        hidden = self.thinker_to_talker_proj(codec + self.extra_rows[: input_ids.shape[0]])
        if self._fused_decoder.fits(hidden):
            return self._fused_decoder(positions, hidden)
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.never_sampled, float("-inf"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = ((name, tensor) for name, tensor in weights if name.startswith(PREFIX))
        return AutoWeightsLoader(self).load_weights(own, mapper=self.hf_to_vllm_mapper)


def never_sampled(vocab_size: int, ids: SpecialIds) -> torch.Tensor:
    """Bool `[vocab_size]`: the codec bos, which the reference suppresses, and ids that are neither code nor stop.

    On one of the latter the reference's code embedding would fail, so no answer of the reference has them.
    """
    mask = torch.arange(vocab_size) >= ids.num_codes
    mask[list(ids.codec_stops)] = False
    mask[ids.codec_bos] = True
    return mask


def talker_config(config: Any) -> Any:
    """`hf_overrides` of the talker's engine: the checkpoint's talker part as a model of its own."""
    talker = getattr(config, "talker_config", config)
    if talker is not config:
        talker.special_ids = SpecialIds.from_config(config.to_dict())
    talker.architectures = [ARCHITECTURE]
    return talker


# As a class object: vLLM would inspect a dotted name in a process of its own, which takes seconds.
ModelRegistry.register_model(ARCHITECTURE, Qwen2_5OmniTalker)
