"""Trains the toy's thinker, with its towers, on conversations of the small world.

    python -m training.thinker --out FOLDER --minutes 10

`--init` begins with the weights of an earlier training, or with the towers that `training.hearing` and
`training.seeing` have trained. The audio tower goes on to be taught by its reader beside the thinker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.types.errors import ConfigError
from training import hearing, seeing
from training.batches import TYPED_ONLY, Batch, Batcher, Conversations, Mix, examination
from training.checkpoint import toy_config, write_toy
from training.hearing import READER
from training.layout import Layout
from training.pool import Pool, kept_pool, make_pool
from training.reader import Reader
from training.recordings import Recordings
from training.run import given_options
from training.towers import hear, see
from training.trainer import Guesses, Trainer, TrainerPlan, halved, trainer_options
from training.world import Split

WEIGHTS: Final = "thinker.safetensors"
CTC: Final = 0.3


class Media:
    """A pool's sounds and pictures on the training device."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.recordings = Recordings(pool.samples, pool.begins, device)
        self._pictures = [torch.from_numpy(picture.copy()) for picture in pool.pictures]
        self._device = device

    def pictures(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._pictures[number] for number in numbers]).to(self._device, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def think(thinker: Any, batch: Batch, media: Media, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Last hidden states `[b, n, hidden]`, and the rows of all sounds, as `hear` gives them."""
    device = thinker.lm_head.weight.device
    embeddings = thinker.model.embed_tokens(to_device(batch.ids, device))
    flat, heard = embeddings.flatten(0, 1), None
    if batch.hearings:
        heard = hear(thinker.audio_tower, *media.recordings.heard(batch.hearings, seed))
        places = to_device(batch.sound_of * heard.shape[1] + batch.sound_row, device)
        rows = heard.flatten(0, 1).index_select(0, places)
        flat = flat.index_copy(0, to_device(batch.sound_to, device), rows.to(flat.dtype))
    for size, numbers in batch.shown.items():
        rows = see(thinker.visual, media.pictures(numbers)).flatten(0, 1)
        flat = flat.index_copy(0, to_device(batch.shown_to[size], device), rows.to(flat.dtype))
    hidden = thinker.model(
        inputs_embeds=flat.view_as(embeddings), position_ids=to_device(batch.positions, device), use_cache=False
    ).last_hidden_state
    return hidden, heard


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerPlan(TrainerPlan):
    """`size`: conversations of a step, `most_tokens` of them in a batch. `init`: a folder whose weights are begun with,
    those of a thinker or of towers alone.
    """

    init: Path | None = None
    most_tokens: int = 65_536
    mix: Mix = field(default_factory=Mix)


class Learner(nn.Module):
    """The thinker, and what reads letters off its audio rows."""

    def __init__(self) -> None:
        super().__init__()
        config = toy_config().thinker_config
        self.thinker = Qwen2_5OmniThinkerForConditionalGeneration(config)
        self.reader = Reader(config.text_config.hidden_size)

    def forward(self, batch: Batch, media: Media, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[targets, vocabulary]`, and the reader's loss of all sounds."""
        device = self.thinker.lm_head.weight.device
        hidden, heard = think(self.thinker, batch, media, seed)
        nothing = torch.zeros((), device=device)
        ctc = nothing if heard is None else self.reader.loss(heard, batch.hearings, batch.said)
        foretelling = hidden.flatten(0, 1).index_select(0, to_device(batch.before, device))
        return self.thinker.lm_head(foretelling), ctc

    def begin_with(self, folder: Path) -> None:
        """Raises ConfigError for a folder with neither a thinker's weights nor a tower's."""
        is_whole = (folder / WEIGHTS).is_file()
        names = (WEIGHTS,) if is_whole else (hearing.TOWER, seeing.TOWER)
        if not (files := [folder / name for name in names if (folder / name).is_file()]):
            raise ConfigError(f"{folder} has none of {', '.join((WEIGHTS, *names))}: give the folder of a training.")
        weights = {name.removeprefix("thinker."): each for file in files for name, each in load_file(file).items()}
        self.thinker.load_state_dict(weights, strict=is_whole)
        if (reader := folder / READER).is_file():
            self.reader.load_state_dict(load_file(reader))


class ThinkerTrainer(Trainer[Batch]):
    """One run of the thinker's training."""

    name = "thinker"
    shares: ClassVar[Mapping[str, float]] = {"loss": 1.0, "ctc": CTC}
    learner: Learner

    def __init__(self, plan: ThinkerPlan, pool: Pool, exam_pool: Pool) -> None:
        torch.manual_seed(plan.seed)
        layout = Layout(PromptMaker(FileTokenizer(plan.out)))
        conversations = Conversations(pool, Split.TRAIN, plan.mix)
        batcher = Batcher(conversations, layout, pool, plan.seed, plan.size, plan.most_tokens)
        device = torch.device(plan.device)
        self.media, self._exam_media = Media(pool, device), Media(exam_pool, device)
        learner = Learner()
        if plan.init is not None:
            learner.begin_with(plan.init)
        super().__init__(plan, learner, batcher, _exam_batches(plan, exam_pool, layout))

    def losses(self, given: Batch, seed: int) -> dict[str, torch.Tensor]:
        logits, ctc = self.learner(given, self.media, seed)
        targets = to_device(given.targets, self._device)
        return {"loss": cross_entropy(logits.float(), targets, reduction="sum"), "ctc": ctc}

    def counts(self, given: Batch) -> dict[str, int]:
        return {"loss": len(given.targets), "ctc": len(given.hearings)}

    def guesses(self, given: Batch, seed: int) -> Guesses:
        logits, _ = self.learner(given, self._exam_media, seed)
        return Guesses(logits.argmax(1), given.targets, given.owners, given.kinds)

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {WEIGHTS: halved(self.learner.thinker, "thinker"), READER: self.learner.reader.state_dict()}


def _exam_batches(plan: ThinkerPlan, pool: Pool, layout: Layout) -> list[Batch]:
    conversations = Conversations(pool, Split.HELD_OUT, plan.mix)
    asked = examination(pool, conversations, plan.exam)
    if plan.mix == TYPED_ONLY:
        asked = (each for each in asked if each.kind.startswith("typed") and "shown" not in each.kind)
    return Batcher(conversations, layout, pool, 0, 0, plan.most_tokens // 4).of(list(asked))


def train(plan: ThinkerPlan) -> Mapping[str, float]:
    if not (plan.out / "config.json").is_file():
        write_toy(plan.out)
    began = time.monotonic()
    hears, sees = plan.mix.spoken or plan.mix.transcripts, plan.mix.shown
    counts = plan.pieces if hears else 0, plan.pictures if sees else 0
    make = partial(make_pool, Split.TRAIN, *counts, plan.seed)
    pool = kept_pool(plan.pool, make)
    exam = make_pool(Split.HELD_OUT, plan.exam, plan.exam // 4 if sees else 0, plan.seed)
    print(f"{len(pool.spoken)} sounds and {len(pool.shown)} pictures in {time.monotonic() - began:.0f} s", flush=True)
    return ThinkerTrainer(plan, pool, exam).train()


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = trainer_options("Trains the toy's thinker.", "most-tokens")
    parser.add_argument("--init", type=Path, help="a folder whose weights are begun with")
    parser.add_argument("--typed-only", action="store_true", help="without sounds and pictures")
    chosen = given_options(parser)
    mix = TYPED_ONLY if chosen.pop("typed_only") else Mix()
    train(ThinkerPlan(**chosen, mix=mix))


if __name__ == "__main__":
    main()
