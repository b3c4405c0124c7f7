"""A tiny decoder of three codebooks for vLLM, and the same as a plain loop over transformers' Qwen2.

The engine samples the first code of a frame. The two others come after it, each from the hidden state and the codes
before it, and the next position's input is the sum of the embeddings of all three.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM as StockDecoder

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.traits import EngineTraits
from omni_cluster.memory.sizes import ARSizes
from omni_cluster.models.after_sampling import Sampled
from omni_cluster.models.family import ARSession, EngineInput, Hold, LaterRows
from omni_cluster.models.seeded_noise import exponential
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.inputs import OmniRequest, Prompt
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows
from tests.rows import KIND

ARCHITECTURE = "ResidualDecoder"
NAME = "decoder"
VOCAB, RESIDUAL, WIDTH = 97, 2, 128
MAX_POSITIONS = 256


class ResidualDecoder(StockDecoder, SupportsMRoPE):
    """vLLM's Qwen2 with rows and residual codes in its input."""

    extra_rows: torch.Tensor
    residual_codes: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.tables = nn.Parameter(torch.empty(RESIDUAL, VOCAB, WIDTH), requires_grad=False)
        self.heads = nn.Parameter(torch.empty(RESIDUAL, VOCAB, WIDTH), requires_grad=False)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("extra_rows", torch.zeros(tokens, WIDTH), persistent=False)
        self.register_buffer("residual_codes", torch.zeros(tokens, RESIDUAL, dtype=torch.int16), persistent=False)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(input_tokens)).expand(3, -1).contiguous(), 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        n = len(input_ids)
        rows = self.extra_rows[:n] + embedded(self.tables, self.residual_codes[:n])
        return self.model(input_ids, positions, inputs_embeds=self.embed_input_ids(input_ids) + rows)

    def after_sampling(self, sampled: Sampled) -> torch.Tensor:
        """See `AfterSampling`."""
        state, codes = sampled.hidden + self.embed_input_ids(sampled.token_ids), list[torch.Tensor]()
        for number, (table, head) in enumerate(zip(self.tables, self.heads, strict=True), start=1):
            logits = state @ head.T
            ids = (number * VOCAB + torch.arange(VOCAB)).expand(len(logits), -1)
            drawn = (logits.softmax(-1) / exponential(sampled.keys, ids)).argmax(-1)
            codes.append(torch.where(sampled.greedy, logits.argmax(-1), drawn))
            state = state + table[codes[-1]]
        return torch.stack(codes, dim=1).short()


def embedded(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Of `codes` int16 `[n, 2]`, those below zero none: `[n, WIDTH]`."""
    each = tables[torch.arange(RESIDUAL), codes.long().clamp(min=0)]
    return (each * (codes >= 0).unsqueeze(-1)).sum(dim=1)


def decoder_config(config: Any) -> Any:
    """`hf_overrides` of the stage; an engine's process that unpickles it registers the model."""
    config.architectures = [ARCHITECTURE]
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return config


ModelRegistry.register_model(ARCHITECTURE, ResidualDecoder)


class Session:
    """A prompt of token ids with a row for each position, and one for all positions behind them."""

    def __init__(self, request: OmniRequest) -> None:
        self.known = request.known_of(NAME)
        assert isinstance(request.prompt, Prompt) and request.prompt.token_ids is not None
        self._ids = request.prompt.token_ids
        self._stops = request.sampling[NAME].get("stop_token_ids", [])

    async def prompt(self) -> EngineInput | None:
        rows, pad = rows_of(self._ids)
        positions = torch.arange(len(self._ids)).expand(3, -1).contiguous().numpy()
        return EngineInput(
            prompt={"prompt_token_ids": list(self._ids)},
            sampling={"stop_token_ids": self._stops, "ignore_eos": True, "detokenize": False},
            rows=[Rows.of(KIND, 0, rows, positions)],
            pad_row=Rows.of(KIND, 0, pad),
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        for later in ():
            yield later


def rows_of(ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a prompt: a row `[1, WIDTH]` a position, and the pad row."""
    made = torch.randn(len(ids) + 1, WIDTH, generator=torch.Generator().manual_seed(sum(ids)))
    return made[:-1], made[-1:]


class Decoder(ARSpec):
    """The stage of this model, alone."""

    name = NAME
    emits = frozenset({"codes"})
    reads = frozenset({"rows"})
    has_residual_codes = True

    def __init__(self) -> None:
        pass

    @property
    def traits(self) -> EngineTraits:
        return EngineTraits(decoder_config, has_tokenizer=False, is_compiled=False)

    def sizes(self, config: StageConfig) -> ARSizes:
        raise NotImplementedError

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        return Session(request)


class Reference:
    """The same weights in a plain loop: no cache, no batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
        self.model = Qwen2ForCausalLM(config).float().eval()
        self.tables = torch.randn(RESIDUAL, VOCAB, WIDTH)
        self.heads = torch.randn(RESIDUAL, VOCAB, WIDTH)

    def save(self, folder: Path) -> None:
        weights = {**self.model.state_dict(), "tables": self.tables, "heads": self.heads}
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.model.config.to_dict()))

    @torch.inference_mode()
    def frames(self, ids: Sequence[int], count: int, *, feeds_back: bool = True) -> list[tuple[int, ...]]:
        """Greedy frames of three codes."""
        rows, pad = rows_of(ids)
        embed = self.model.get_input_embeddings()
        inputs, frames = embed(torch.tensor(ids)) + rows, list[tuple[int, ...]]()
        while len(frames) < count:
            hidden = self.model.model(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
            token = int(self.model.lm_head(hidden).argmax())
            state, codes = hidden + embed.weight[token], list[int]()
            for table, head in zip(self.tables, self.heads, strict=True):
                codes.append(int((head @ state).argmax()))
                state = state + table[codes[-1]]
            frames.append((token, *codes))
            said = embedded(self.tables, torch.tensor([codes])) if feeds_back else torch.zeros(1, WIDTH)
            inputs = torch.cat([inputs, embed.weight[token] + said + pad])
        return frames
