"""Trains the toy's talker on the rows of a trained thinker, which stays as it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5OmniTalkerForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from training.batches import Batch, Batcher, Conversations, Mix
from training.checkpoint import toy_config
from training.layout import Layout
from training.loop import Guesses, Run, Trainer
from training.pool import Pool, make_pool
from training.speaking import MASK, SPECIAL_ROWS, Codes, Speech, Speeches
from training.thinker import WEIGHTS as THINKER_WEIGHTS
from training.thinking import Media, think, to_device
from training.world import Item, Split, items

WEIGHTS: Final = "talker.safetensors"
MISHEARD: Final = 0.05
MIX: Final = Mix(spoken=25, shown=8, transcripts=0, later=20, long=2, aloud=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Run):
    """`items`: questions that are answered. `pieces`, `pictures`: of others that are spoken, and shown.

    `out` has the thinker's weights. `size`: conversations of a step, `most_tokens` of them in a batch.
    """

    items: int = 30_000
    pieces: int = 8_000
    pictures: int = 2_000
    exam: int = 300
    size: int = 384
    most_tokens: int = 65_536
    mix: Mix = field(default_factory=lambda: MIX)


class Learner(nn.Module):
    """The talker, behind a thinker that is not trained."""

    def __init__(self, thinker: Any) -> None:
        """`thinker`: on the training device."""
        super().__init__()
        config = toy_config()
        # In a list, so that it is no part of this module: neither trained nor kept.
        self._thinker = [thinker.eval().requires_grad_(False)]
        self.talker = Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)
        self._media_ids = [config.thinker_config.audio_token_index, config.thinker_config.image_token_index]

    def forward(self, batch: Batch, speech: Speech, media: Media, seed: int) -> torch.Tensor:
        """Logits `[targets, codes]`."""
        device = self.talker.codec_head.weight.device
        rows = self.rows(batch, media, seed)[to_device(speech.rows, device)]
        codes = to_device(speech.codes, device)
        embedded = self.talker.get_input_embeddings()(codes).masked_fill((codes == MASK)[..., None], 0)
        hidden = self.talker.model(
            inputs_embeds=self.talker.thinker_to_talker_proj(rows + embedded),
            position_ids=to_device(speech.positions, device), use_cache=False,
        ).last_hidden_state  # fmt: skip
        return self.talker.codec_head(hidden.flatten(0, 1).index_select(0, to_device(speech.before, device)))

    @torch.no_grad()
    def rows(self, batch: Batch, media: Media, seed: int) -> torch.Tensor:
        """The thinker's, `[b * n + special, hidden]`: last hidden state plus embedding, which media have not."""
        thinker = self._thinker[0]
        hidden, _ = think(thinker, batch, media, seed)
        ids, table = to_device(batch.ids, hidden.device), thinker.get_input_embeddings()
        is_media = torch.isin(ids, torch.tensor(self._media_ids, device=hidden.device))
        own = hidden.float() + table(ids).masked_fill(is_media[..., None], 0)
        return torch.cat([own.flatten(0, 1), table(torch.tensor(SPECIAL_ROWS, device=hidden.device))])


class TalkerTrainer(Trainer[tuple[Batch, Speech]]):
    """One run of the talker's training."""

    name = "talker"
    shares: ClassVar[Mapping[str, float]] = {"loss": 1.0}
    learner: Learner

    def __init__(self, plan: Plan, pool: Pool, exam_pool: Pool, said: Sequence[Item], codes: Codes) -> None:
        """`said`: what is typed, and read aloud. `codes`: of all answers of both pools and of it."""
        torch.manual_seed(plan.seed)
        layout, device = Layout(PromptMaker(FileTokenizer(plan.out))), torch.device(plan.device)
        self.media, self._exam_media = Media(pool, device), Media(exam_pool, device)
        asked = Conversations(pool, Split.TRAIN, plan.mix, said)
        batcher = Batcher(asked, layout, pool, plan.seed, plan.size, plan.most_tokens)
        held_out = Conversations(exam_pool, Split.HELD_OUT, plan.mix, [*exam_pool.spoken])
        exam = Batcher(held_out, layout, exam_pool, plan.seed, plan.exam, plan.most_tokens // 4)
        super().__init__(
            plan, Learner(trained_thinker(plan.out).to(device)), Speeches(batcher, codes, plan.seed, MISHEARD),
            Speeches(exam, codes, plan.seed, 0.0)[0],
        )  # fmt: skip

    def losses(self, given: tuple[Batch, Speech], seed: int) -> dict[str, torch.Tensor]:
        logits = self.learner(*given, self.media, seed)
        targets = to_device(given[1].targets, self._device)
        return {"loss": cross_entropy(logits.float(), targets, reduction="sum")}

    def counts(self, given: tuple[Batch, Speech]) -> dict[str, int]:
        return {"loss": len(given[1].targets), "tokens": given[1].codes.size}

    def guesses(self, given: tuple[Batch, Speech], seed: int) -> Guesses:
        batch, speech = given
        logits = self.learner(batch, speech, self._exam_media, seed)
        return Guesses(logits.argmax(1), speech.targets, speech.owners, batch.kinds)

    def write_weights(self) -> None:
        halved = {f"talker.{name}": each.half().cpu() for name, each in self.learner.talker.state_dict().items()}
        save_file(halved, self._run.out / WEIGHTS, metadata={"format": "pt"})


def trained_thinker(folder: Path) -> Any:
    thinker = Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config)
    weights = load_file(folder / THINKER_WEIGHTS)
    thinker.load_state_dict({name.removeprefix("thinker."): each for name, each in weights.items()})
    return thinker


def codes_of_all(said: Sequence[Item], codes_of: Callable[[str], Sequence[int]]) -> Codes:
    """Of the answers of all items."""
    return {text: codes_of(text) for text in sorted({item.answer for item in said})}


def train(plan: Plan, codes_of: Callable[[str], Sequence[int]]) -> Mapping[str, float]:
    """`codes_of`: the codes of a text."""
    makers = plan.workers and (os.cpu_count() or 1)
    pool = make_pool(Split.TRAIN, plan.pieces, plan.pictures, plan.seed, makers)
    exam = make_pool(Split.HELD_OUT, plan.exam, plan.exam // 8, plan.seed, makers)
    said = [*islice(items(Split.TRAIN, plan.seed), plan.items)]
    codes = codes_of_all([*said, *pool.spoken, *pool.shown, *exam.spoken, *exam.shown], codes_of)
    return TalkerTrainer(plan, pool, exam, said, codes).train()
