"""What transformers' talker says of codes that were drawn: how far each is behind the best one of its draw.

In float64, but for norms and routers, which transformers has in float32. Of all frames at once: each is computed from
those before it, as they were drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen3_omni.talker import TalkerSession
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.voices import voice_id, voice_ids
from omni_cluster.models.seeded_noise import exponential, state_of, token_keys
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import at_once

TIE = 1e-5
"""Codes that are as close to each other are a tie, which rounding decides.

Logits of the tiny talker are up to 8, and those of two ways to compute them in float32 differ by up to 4e-6: half of
what two of them may come closer.
"""
PENALTY = 1.05
PREDICTOR_BOUNDS = (50, 0.8)
"""Top-k and top-p of residual codes, in transformers' code."""


@dataclass(frozen=True)
class Drawing:
    """How the codes of a request were drawn. Without a seed the likeliest ones were taken."""

    seed: int | None
    temperature: float = 0.8
    top_k: int = 20

    @property
    def sampling(self) -> dict[str, Any]:
        if self.seed is None:
            return {"temperature": 0}
        return {"temperature": self.temperature, "top_k": self.top_k, "seed": self.seed}


class Judge:
    """transformers' talker of `model`, a whole Qwen3-Omni whose checkpoint is in `folder`."""

    def __init__(self, model: Any, folder: Path) -> None:
        config = read_config(folder)
        self._ids, self._voices = TalkerIds.from_config(config), voice_ids(config)
        self._talker = copy.deepcopy(model.talker).double()
        self._talker.set_experts_implementation("eager")  # the others have no float64
        self._text_table = model.thinker.get_input_embeddings().weight.double()

    async def behind(self, reply: StageChunk, codes: np.ndarray, drawing: Drawing, voice: str = "ethan") -> np.ndarray:
        """Of each of `codes` int16 `[n, Q]`, from the first one on: how far it is behind the best of its draw.

        In the log of a code's chance over its noise; infinite for a code that is outside the bounds. The thinker of the
        request said `reply`.
        """
        prompt_ids, text_ids = await self._input_ids(reply, len(codes), voice)
        drawn = torch.from_numpy(codes.astype(np.int64))
        with torch.inference_mode():
            hidden = self._hidden(prompt_ids, text_ids, drawn)
            first = self._penalised(self._talker.codec_head(hidden), drawn[:, 0])
            residual = self._residual_logits(hidden, drawn)
        return self._judged(first, residual, drawn, drawing)

    async def _input_ids(self, reply: StageChunk, frames: int, voice: str) -> tuple[list[int], list[int]]:
        """Of the prompt's codec side, and of the text side of all positions."""
        session = TalkerSession(OmniRequest("judged", ""), at_once([reply]), self._ids, voice_id(self._voices, voice))
        made = await session.prompt()
        assert made is not None and made.rows_complete and made.pad_row is not None
        prompt_ids = made.prompt["prompt_token_ids"]
        text = [int(i) for part in made.rows for i in part.tensor().flatten()]
        pads = [int(made.pad_row.tensor())] * (len(prompt_ids) + frames)
        return prompt_ids, (text + pads)[: len(prompt_ids) + frames]

    def _hidden(self, prompt_ids: Sequence[int], text_ids: Sequence[int], drawn: torch.Tensor) -> torch.Tensor:
        """From which each frame's first code is drawn, `[n, H]`."""
        of_prompt, tables = torch.tensor(prompt_ids), self._talker.code_predictor.get_input_embeddings()
        embed = self._talker.get_input_embeddings()
        codec = embed(of_prompt) * (of_prompt != self._ids.codec.unspoken)[:, None]
        frames = embed(drawn[:, 0]) + sum(table(drawn[:, 1 + i]) for i, table in enumerate(tables))
        text = self._talker.text_projection(self._text_table[torch.tensor(text_ids)])
        entering = (text + torch.cat([codec, frames]))[None]
        positions = torch.arange(entering.shape[1]).expand(3, 1, -1)
        states = self._talker.model(inputs_embeds=entering, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = states.last_hidden_state[0, len(prompt_ids) - 1 : -1]
        return hidden

    def _penalised(self, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """By the codes before each; without the marks of the codec, which end nothing in these tests."""
        made = torch.nn.functional.one_hot(first, logits.shape[1])
        seen = (made.cumsum(0) - made) > 0
        penalised = torch.where(logits > 0, logits / PENALTY, logits * PENALTY)
        return torch.where(seen, penalised, logits)[:, : self._ids.codec.num_codes]

    def _residual_logits(self, hidden: torch.Tensor, drawn: torch.Tensor) -> list[torch.Tensor]:
        predictor = self._talker.code_predictor
        before = [table(drawn[:, 1 + i]) for i, table in enumerate(predictor.get_input_embeddings())]
        entering = torch.stack([hidden, self._talker.get_input_embeddings()(drawn[:, 0]), *before[:-1]], dim=1)
        states = predictor.model(inputs_embeds=entering, use_cache=False).last_hidden_state
        return [head(states[:, 1 + i]) for i, head in enumerate(predictor.lm_head)]

    def _judged(
        self, first: torch.Tensor, residual: list[torch.Tensor], drawn: torch.Tensor, drawing: Drawing
    ) -> np.ndarray:
        if drawing.seed is None:
            logs = [first, *residual]
        else:
            talkers = bounded(first / drawing.temperature, drawing.top_k, 1.0)
            noise = self._noise(drawing.seed, first, residual)
            kept = [talkers, *(bounded(logits, *PREDICTOR_BOUNDS) for logits in residual)]
            logs = [each - one.log() for each, one in zip(kept, noise, strict=True)]
        lags = [each.amax(1) - each.gather(1, drawn[:, [i]])[:, 0] for i, each in enumerate(logs)]
        behind: np.ndarray = torch.stack(lags, dim=1).numpy()
        return behind

    def _noise(self, seed: int, first: torch.Tensor, residual: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of the ids of the talker's vocabulary, and behind these of each residual codebook."""
        n, codes, vocab_size = *first.shape, self._talker.config.text_config.vocab_size
        starts = np.full(n, state_of(seed), np.uint64)
        keys = torch.from_numpy(token_keys(starts, np.arange(n)))
        ids = torch.arange(codes)
        firsts = [0, *range(vocab_size, vocab_size + codes * len(residual), codes)]
        return [exponential(keys, (start + ids).expand(n, -1)) for start in firsts]


def bounded(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`logits` within top-k, and within the fewest of these that have `top_p` of their probability together."""
    best = logits.topk(top_k).values
    shares = best.softmax(-1)
    least = best.masked_fill(shares.cumsum(-1) - shares >= top_p, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < least, float("-inf"))
