"""The talker as a vLLM model: both sides of a position, a decoder of experts, and the predictor behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from omni_cluster.models.after_sampling import NO_CODE, Sampled
from omni_cluster.models.qwen3_omni.fine_positions import as_floats, packed_delta
from omni_cluster.models.qwen3_omni.predictor import CodePredictor, Given
from omni_cluster.models.qwen3_omni.predictor_graphs import PredictorGraphs
from omni_cluster.models.qwen3_omni.rotation import StepTable
from omni_cluster.models.qwen3_omni.talker_ids import CodecIds, TalkerIds
from omni_cluster.types.rows import NO_ID

ARCHITECTURE = "Qwen3OmniTalker"
PREFIX = "talker."
PREDICTOR = "talker.code_predictor."
TEXT_TABLE = "thinker.model.embed_tokens.weight"
EXPERT_GATE = ".mlp.shared_expert_gate"
PROJECTED_AT_ONCE = 8_192
"""Rows of the thinker's table."""


class Projection(nn.Module):
    """From the thinker's width to the talker's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.thinker_hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        entered: torch.Tensor = self.linear_fc2(functional.silu(self.linear_fc1(states)))
        return entered


class Qwen3OmniTalker(nn.Module, SupportsMRoPE):
    """Computes what transformers' `Qwen3OmniMoeTalkerForConditionalGeneration` does.

    Before a step the runner fills the buffers `extra_rows`, `extra_ids` and `residual_codes`, each of one address for
    ever, so that CUDA graphs replay them. A position has an id, or in its place a row of the thinker's.
    """

    extra_rows: torch.Tensor
    extra_ids: torch.Tensor
    residual_codes: torch.Tensor
    text_table: torch.Tensor
    """The thinker's embeddings of text, projected once: what enters at a position with an id."""
    never_sampled: torch.Tensor

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"talker.model.codec_embedding.": "model.embed_tokens.", "talker.": ""}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        codec: CodecIds = config.talker_ids.codec
        self._unspoken = codec.unspoken
        self.model = Qwen3MoeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if vllm_config.device_config.device_type == "cpu":
            spread_gates(self.model, config.hidden_size)
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.text_projection, self.hidden_projection = Projection(config), Projection(config)
        self.code_predictor = CodePredictor(config.code_predictor_config, first_noise_id=config.vocab_size)
        self._residual_of = PredictorGraphs(self.code_predictor)
        num_tokens, dtype = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.dtype
        self._angles = StepTable(config, num_tokens, dtype)
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = self._angles.rotary
        buffers = {
            "extra_rows": torch.zeros(num_tokens, config.thinker_hidden_size, dtype=dtype),
            "extra_ids": torch.full((num_tokens,), NO_ID, dtype=torch.int32),
            "residual_codes": torch.full((num_tokens, self.code_predictor.residual), NO_CODE, dtype=torch.int16),
            "text_table": torch.zeros(config.talker_ids.text.num_ids, config.hidden_size, dtype=dtype),
            "never_sampled": never_sampled(config.vocab_size, codec),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """For requests that bring no positions of their own: without media, and vLLM's warm-up."""
        return torch.arange(len(input_tokens)).expand(3, -1).contiguous(), 0

    @staticmethod
    def position_delta(positions: torch.Tensor) -> np.int64:
        """Of those that a request brings, packed `[3, n]`: how far what follows is from its number."""
        return packed_delta(as_floats(positions.numpy()))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`input_ids` `[n]`, packed `positions` `[3, n]` -> hidden states `[n, hidden_size]`."""
        entering = self._text_side(len(input_ids)) + self._codec_side(input_ids)
        hidden: torch.Tensor = self.model(None, self._angles(positions), inputs_embeds=entering)
        return hidden

    def _text_side(self, n: int) -> torch.Tensor:
        ids = self.extra_ids[:n]
        text = functional.embedding(ids.clamp(min=0), self.text_table)
        return torch.where((ids == NO_ID).unsqueeze(-1), self.hidden_projection(self.extra_rows[:n]), text)

    def _codec_side(self, input_ids: torch.Tensor) -> torch.Tensor:
        residual = self.code_predictor.embedded(self.residual_codes[: len(input_ids)])
        first = self.embed_input_ids(input_ids)
        return torch.where((input_ids == self._unspoken).unsqueeze(-1), 0, first) + residual

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.never_sampled, float("-inf"))

    def after_sampling(self, sampled: Sampled) -> torch.Tensor:
        """See `AfterSampling`."""
        first = self.embed_input_ids(sampled.token_ids)
        return self._residual_of(Given(sampled.hidden, first, sampled.greedy, sampled.keys)).short()

    def capture_after_sampling(self, sizes: Sequence[int]) -> None:
        """See `AfterSampling`."""
        if self.never_sampled.is_cuda:
            self._residual_of.capture(sizes)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """By which vLLM leaves files unread."""
        return not name.startswith(PREFIX) and name != TEXT_TABLE

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        texts = list[torch.Tensor]()
        loaded = AutoWeightsLoader(self).load_weights(own_weights(weights, texts), mapper=self.hf_to_vllm_mapper)
        for table in texts:
            self._project(table)
        return loaded

    def _project(self, table: torch.Tensor) -> None:
        with torch.inference_mode():
            for first in range(0, len(table), PROJECTED_AT_ONCE):
                part = table[first : first + PROJECTED_AT_ONCE].to(self.text_table)
                self.text_table[first : first + len(part)] = self.text_projection(part)


def own_weights(
    weights: Iterable[tuple[str, torch.Tensor]], texts: list[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The talker's, one after another: all at once they would be on the card twice. Puts the thinker's into `texts`.

    But for the predictor's, which it loads at once: they come last, for files of a checkpoint may have them apart.
    """
    of_predictor = list[tuple[str, torch.Tensor]]()
    for name, tensor in weights:
        if name == TEXT_TABLE:
            texts.append(tensor)
        elif name.startswith(PREDICTOR):
            of_predictor.append((name, tensor))
        elif name.startswith(PREFIX):
            yield name, tensor
    yield from of_predictor


def spread_gates(model: nn.Module, width: int) -> None:
    """Has the gate of each shared expert give a position's value `width` times: once for each that it multiplies.

    torch's sigmoid on a CPU takes whole vectors at once and the rest one by one, which differ in the last bit. Of one
    value a position, that bit would hang on the number of positions in a step. A prefix that is computed anew must have
    the bits that it had when it was decoded: near a tie, they decide what is sampled behind it.
    """
    for name, module in model.named_modules():
        if name.endswith(EXPERT_GATE):
            module.register_forward_hook(partial(_spread, width))


def _spread(width: int, _gate: nn.Module, _states: Any, made: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    value, bias = made
    return value.expand(-1, width).contiguous(), bias


def never_sampled(vocab_size: int, codec: CodecIds) -> torch.Tensor:
    """Bool `[vocab_size]`: all that is no code, but for what ends them, as transformers suppresses it."""
    mask = torch.arange(vocab_size) >= codec.num_codes
    mask[codec.eos] = False
    return mask


def talker_config(config: Any) -> Any:
    """`hf_overrides` of the talker's engine: its decoder's part of the checkpoint as a model of its own."""
    talker = getattr(config, "talker_config", None)
    if talker is None:  # it has been made before, or vLLM asks for nothing but the architecture
        config.architectures = [ARCHITECTURE]
        return config
    text = talker.text_config
    text.architectures = [ARCHITECTURE]
    text.talker_ids = TalkerIds.from_config(config.to_dict())
    text.code_predictor_config = talker.code_predictor_config
    text.thinker_hidden_size = talker.thinker_hidden_size
    return text


# As a class object: vLLM would inspect a dotted name in a process of its own, which takes seconds.
ModelRegistry.register_model(ARCHITECTURE, Qwen3OmniTalker)
