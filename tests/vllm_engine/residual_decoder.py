"""A tiny decoder of three codebooks for vLLM, and the same as a plain loop over transformers' Qwen2.

The engine samples the first code of a frame. The two others come after it, each from the hidden state and the codes
before it, and the next position's input is the sum of the embeddings of all three. Beside them a position has a row,
the row of an id in another table, or nothing. Some positions of a prompt are frames of three codes, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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
from omni_cluster.types.codes import Codes
from omni_cluster.types.inputs import OmniRequest, Prompt
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import NO_ID, Rows
from tests.rows import KIND

ARCHITECTURE = "ResidualDecoder"
NAME = "decoder"
VOCAB, RESIDUAL, WIDTH = 97, 2, 128
TEXTS = 50_000
"""Ids of the other table: more than int16 has."""
MAX_POSITIONS = 256


class ResidualDecoder(StockDecoder, SupportsMRoPE):
    """vLLM's Qwen2 with rows, ids and residual codes in its input."""

    extra_rows: torch.Tensor
    extra_ids: torch.Tensor
    residual_codes: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.tables = nn.Parameter(torch.empty(RESIDUAL, VOCAB, WIDTH), requires_grad=False)
        self.heads = nn.Parameter(torch.empty(RESIDUAL, VOCAB, WIDTH), requires_grad=False)
        self.texts = nn.Parameter(torch.empty(TEXTS, WIDTH), requires_grad=False)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("extra_rows", torch.zeros(tokens, WIDTH), persistent=False)
        self.register_buffer("extra_ids", torch.zeros(tokens, dtype=torch.int32), persistent=False)
        self.register_buffer("residual_codes", torch.zeros(tokens, RESIDUAL, dtype=torch.int16), persistent=False)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(input_tokens)).expand(3, -1).contiguous(), 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        n = len(input_ids)
        ids = self.extra_ids[:n]
        texts = self.texts[ids.clamp(min=0)] * (ids != NO_ID).unsqueeze(-1)
        rows = self.extra_rows[:n] + texts + embedded(self.tables, self.residual_codes[:n])
        return self.model(input_ids, positions, inputs_embeds=self.embed_input_ids(input_ids) + rows)

    def after_sampling(self, sampled: Sampled) -> torch.Tensor:
        """See `AfterSampling`."""
        state, codes = sampled.hidden + self.embed_input_ids(sampled.token_ids), list[torch.Tensor]()
        for number, (table, head) in enumerate(zip(self.tables, self.heads, strict=True), start=1):
            logits = state @ head.T
            ids = (number * VOCAB + torch.arange(VOCAB, device=logits.device)).expand(len(logits), -1)
            drawn = (logits.softmax(-1) / exponential(sampled.keys, ids)).argmax(-1)
            codes.append(torch.where(sampled.greedy, logits.argmax(-1), drawn))
            state = state + table[codes[-1]]
        return torch.stack(codes, dim=1).short()


def embedded(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Of `codes` int16 `[n, 2]`, those below zero none: `[n, WIDTH]`."""
    each = tables[torch.arange(RESIDUAL, device=tables.device), codes.long().clamp(min=0)]
    return (each * (codes >= 0).unsqueeze(-1)).sum(dim=1)


def decoder_config(config: Any) -> Any:
    """`hf_overrides` of the stage; an engine's process that unpickles it registers the model."""
    config.architectures = [ARCHITECTURE]
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    return config


ModelRegistry.register_model(ARCHITECTURE, ResidualDecoder)


@dataclass(frozen=True)
class Beside:
    """What the positions of a prompt and those behind it have beside their tokens.

    `kinds`: of each position of the prompt, "row", "id" or "nothing". `rows` `[P, WIDTH]` and `ids`, of all of them.
    `codes`: the frames among the prompt's positions. `reply`: ids of the first positions behind it. `pad`: of the
    others, an id or a row `[1, WIDTH]`.
    """

    kinds: list[str]
    rows: torch.Tensor
    ids: list[int]
    codes: Codes
    reply: list[int]
    pad: int | torch.Tensor

    @classmethod
    def of(cls, prompt: Sequence[int]) -> Beside:
        """By the prompt alone."""
        n, dice = len(prompt), torch.Generator().manual_seed(sum(prompt))
        rows = torch.randn(n + 1, WIDTH, generator=dice)
        first, last = n // 3, n // 3 + max(1, n // 4)
        residual = torch.randint(VOCAB, (last - first, RESIDUAL), generator=dice).tolist()
        frames = [[token, *codes] for token, codes in zip(prompt[first:last], residual, strict=True)]
        ids: list[int] = torch.randint(TEXTS, (n + 7,), generator=dice).tolist()
        kinds = [("row", "row", "id", "nothing", "id")[(i + n) % 5] for i in range(n)]
        return cls(kinds, rows[:n], ids[:n], Codes.of(first, frames), ids[n:-1], ids[-1] if n % 2 else rows[n:])

    def parts(self) -> list[Rows]:
        """Of the prompt, a part for each run of rows or ids."""
        made, start = list[Rows](), 0
        for are_rows, run in groupby(self.kinds, lambda kind: kind == "row"):
            end = start + len(list(run))
            ids = [i if kind == "id" else NO_ID for i, kind in zip(self.ids, self.kinds, strict=True)]
            positions = None if made else torch.arange(len(self.kinds)).expand(3, -1).contiguous().numpy()
            rows = Rows.of(KIND, start, self.rows[start:end], positions)
            made.append(rows if are_rows else Rows.of_ids(start, ids[start:end], positions))
            start = end
        return made

    def pad_row(self) -> Rows:
        return Rows.of_ids(0, [self.pad]) if isinstance(self.pad, int) else Rows.of(KIND, 0, self.pad)


class Session:
    """A prompt of token ids with what is beside it. Ids of the reply are those of the upstream, where there is one."""

    def __init__(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None) -> None:
        self.known = request.known_of(NAME)
        assert isinstance(request.prompt, Prompt) and request.prompt.token_ids is not None
        self._ids = request.prompt.token_ids
        self._stops = request.sampling[NAME].get("stop_token_ids", [])
        self._upstream = upstream

    async def prompt(self) -> EngineInput | None:
        beside, ids = Beside.of(self._ids), list(self._ids)
        reply = [Rows.of_ids(len(ids), beside.reply)] if self._upstream is None else []
        return EngineInput(
            prompt={"prompt_token_ids": ids},
            sampling={"stop_token_ids": self._stops, "ignore_eos": True, "detokenize": False},
            rows=beside.parts() + reply,
            rows_complete=self._upstream is None,
            is_part=self._upstream is not None and self.known.made > 0,
            pad_row=beside.pad_row(),
            prompt_codes=beside.codes,
        )

    async def later_rows(self) -> AsyncIterator[LaterRows]:
        assert self._upstream is not None
        end = len(self._ids)
        async for chunk in self._upstream:
            yield LaterRows(Rows.of_ids(end, chunk.token_ids), complete=chunk.finish_reason is not None)
            end += len(chunk.token_ids)


class Decoder(ARSpec):
    """The stage of this model, alone."""

    name = NAME
    emits = frozenset({"codes"})
    reads = frozenset({"rows"})
    takes_ids = True
    has_residual_codes = True
    penalises_prompts = False

    def __init__(self) -> None:
        pass

    @property
    def traits(self) -> EngineTraits:
        return EngineTraits(decoder_config, has_tokenizer=False, is_compiled=False)

    def sizes(self, config: StageConfig) -> ARSizes:
        raise NotImplementedError

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        return Session(request, upstream)


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
        self.texts = torch.randn(TEXTS, WIDTH)

    def save(self, folder: Path) -> None:
        weights = {**self.model.state_dict(), "tables": self.tables, "heads": self.heads, "texts": self.texts}
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.model.config.to_dict()))

    @torch.inference_mode()
    def frames(
        self,
        ids: Sequence[int],
        count: int,
        *,
        feeds_back: bool = True,
        penalty: float = 1.0,
        late: tuple[int, int] = (VOCAB, 0),
    ) -> list[tuple[int, ...]]:
        """Greedy frames of three codes.

        `penalty`: of tokens that were sampled before. `late`: a token, and how many others come before it at least.
        """
        beside = Beside.of(ids)
        embed = self.model.get_input_embeddings()
        inputs, frames = embed(torch.tensor(ids)) + self._beside_prompt(beside), list[tuple[int, ...]]()
        while len(frames) < count:
            hidden = self.model.model(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
            logits = self.model.lm_head(hidden)
            for seen in {frame[0] for frame in frames}:
                logits[seen] *= penalty if logits[seen] < 0 else 1 / penalty
            if len(frames) < late[1]:
                logits[late[0]] = -torch.inf
            token = int(logits.argmax())
            state, codes = hidden + embed.weight[token], list[int]()
            for table, head in zip(self.tables, self.heads, strict=True):
                codes.append(int((head @ state).argmax()))
                state = state + table[codes[-1]]
            said = embedded(self.tables, torch.tensor([codes])) if feeds_back else torch.zeros(1, WIDTH)
            inputs = torch.cat([inputs, embed.weight[token] + said + self._beside_reply(beside, len(frames))])
            frames.append((token, *codes))
        return frames

    def _beside_prompt(self, beside: Beside) -> torch.Tensor:
        of_kind = {"row": beside.rows, "id": self.texts[beside.ids], "nothing": torch.zeros_like(beside.rows)}
        made = torch.stack([of_kind[kind][i] for i, kind in enumerate(beside.kinds)])
        codes = beside.codes
        made[codes.start : codes.end] += embedded(self.tables, torch.tensor(codes.values[:, 1:]))
        return made

    def _beside_reply(self, beside: Beside, number: int) -> torch.Tensor:
        given = beside.reply[number] if number < len(beside.reply) else beside.pad
        return self.texts[given] if isinstance(given, int) else given
