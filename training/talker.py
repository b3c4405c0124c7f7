"""Trains the toy's talker on the rows of a trained thinker, which stays as it is.

    python -m training.talker --thinker FOLDER --codebook FILE --out FOLDER --minutes 10

A pointer tells from the talker's second layer which tokens of the answer are being said while it is trained: what a
small talker gets wrong is where it is in its text. The pointer is no part of the checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5OmniTalkerForConditionalGeneration, Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from training.batches import Batch, Batcher, Conversations, Mix
from training.checkpoint import toy_config
from training.codes import Codes, codes_of_texts
from training.durations import Durations
from training.files import made_by
from training.generation import generate, mistakes
from training.layout import Layout
from training.pool import Pool, kept_pool, make_pool
from training.run import given_options
from training.talker_batches import MASK, SPECIAL_ROWS, VOICES, TalkerBatch, TalkerBatches
from training.texts import Texts, drawn_texts, plain
from training.thinker import WEIGHTS as THINKER_WEIGHTS
from training.thinker import Media, think, to_device
from training.trainer import Guesses, Trainer, TrainerPlan, halved, trainer_options
from training.world import Item, Split, items

WEIGHTS: Final = "talker.safetensors"
CODES: Final = "codes.json"
MISHEARD: Final = 0.05
MIX: Final = Mix(spoken=25, shown=12, transcripts=0, later=20, long=2, aloud=50)
POINTED_LAYER: Final = 2
POINTING: Final = 0.3
LONGEST: Final = 1.3
"""What is said by itself may be so much longer than the longest text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerPlan(TrainerPlan):
    """`thinker`: a folder with its weights and the toy's files; `out` is another one, or the same.

    `items`: questions that are answered, and `texts` of each kind that are read. `pieces`, `pictures`: of questions
    that are spoken, and shown; they are kept in `pool`, as the thinker's training does. `exam`: held-out ones, of which
    `generated` are said without help. `codes`: the file of codes that are made already; of `out`, unless given.
    `size`: conversations of a step, `most_tokens` of them in a batch. `init`: a folder with the weights of an earlier
    training, which are begun with.
    """

    thinker: Path
    codebook: Path
    init: Path | None = None
    codes: Path | None = None
    pool: Path | None = None
    items: int = 40_000
    texts: int = 12_000
    pieces: int = 8_000
    pictures: int = 2_000
    exam: int = 300
    generated: int = 64
    size: int = 384
    most_tokens: int = 65_536
    mix: Mix = field(default_factory=lambda: MIX)


class Learner(nn.Module):
    """The talker, behind a thinker that is not trained, and the pointer."""

    def __init__(self, thinker: Any) -> None:
        """`thinker`: on the training device."""
        super().__init__()
        config = toy_config()
        # In a list, so that it is no part of this module: neither trained nor kept.
        self._thinker = [thinker.eval().requires_grad_(False)]
        self.talker = Qwen2_5OmniTalkerForConditionalGeneration(config.talker_config)
        width = config.talker_config.hidden_size
        self.asking, self.asked = nn.Linear(width, width // 4), nn.Linear(width, width // 4)
        self._media_ids = [config.thinker_config.audio_token_index, config.thinker_config.image_token_index]

    def begin_with(self, folder: Path) -> None:
        """Of an earlier training, whose pointer was not kept."""
        weights = load_file(made_by("talker", folder / WEIGHTS))
        self.talker.load_state_dict({name.removeprefix("talker."): each for name, each in weights.items()})

    def forward(self, batch: Batch, speech: TalkerBatch, media: Media, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[targets, codes]`, and the pointer's loss of all targets that say a word."""
        hidden, pointed = self.hidden(self.rows(batch, media, seed), speech)
        return self.logits(hidden, speech), self._pointing_loss(pointed, speech)

    def hidden(self, rows: torch.Tensor, speech: TalkerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`[b, n, hidden]`: the last layer's, and the one's that is pointed from."""
        device = rows.device
        codes = to_device(speech.codes, device)
        embedded = self.talker.get_input_embeddings()(codes).masked_fill((codes == MASK)[..., None], 0)
        made = self.talker.model(
            inputs_embeds=self.talker.thinker_to_talker_proj(rows[to_device(speech.rows, device)] + embedded),
            position_ids=to_device(speech.positions, device), use_cache=False, output_hidden_states=True,
        )  # fmt: skip
        return made.last_hidden_state, made.hidden_states[POINTED_LAYER]

    def logits(self, hidden: torch.Tensor, speech: TalkerBatch) -> torch.Tensor:
        return self.talker.codec_head(hidden.flatten(0, 1).index_select(0, to_device(speech.before, hidden.device)))

    def _pointing_loss(self, hidden: torch.Tensor, speech: TalkerBatch) -> torch.Tensor:
        """From each position to the rows of the answer that have arrived there, all tokens of a word alike."""
        device, width = hidden.device, hidden.shape[1]
        arrivals, spans = to_device(speech.arrivals, device), to_device(speech.tokens_of, device)
        asked = self.asked(hidden).gather(1, arrivals[..., None].expand(-1, -1, self.asked.out_features))
        scores = (self.asking(hidden) @ asked.transpose(1, 2)).float() * self.asked.out_features**-0.5
        is_there = (arrivals[:, None] > 0) & (arrivals[:, None] <= torch.arange(width, device=device)[:, None])
        # Finite, for a prompt's positions, where none has arrived.
        likely = scores.masked_fill(~is_there, -1e4).log_softmax(2).flatten(0, 1)
        likely = likely.index_select(0, to_device(speech.before, device))
        tokens = torch.arange(likely.shape[1], device=device)
        is_said = (tokens >= spans[:, :1]) & (tokens < spans[:, 1:])
        loss = -likely.masked_fill(~is_said, -1e4).logsumexp(1)
        return (loss * is_said.any(1)).sum()

    @torch.no_grad()
    def rows(self, batch: Batch, media: Media, seed: int) -> torch.Tensor:
        """The thinker's, `[b * n + special, hidden]`: last hidden state plus embedding, which media have not."""
        thinker = self._thinker[0]
        hidden, _ = think(thinker, batch, media, seed)
        ids, table = to_device(batch.ids, hidden.device), thinker.get_input_embeddings()
        is_media = torch.isin(ids, torch.tensor(self._media_ids, device=hidden.device))
        own = hidden.float() + table(ids).masked_fill(is_media[..., None], 0)
        return torch.cat([own.flatten(0, 1), table(torch.tensor(SPECIAL_ROWS, device=hidden.device))])


class TalkerTrainer(Trainer[tuple[Batch, TalkerBatch]]):
    """One run of the talker's training."""

    name = "talker"
    shares: ClassVar[Mapping[str, float]] = {"loss": 1.0, "pointing": POINTING}
    learner: Learner

    def __init__(self, plan: TalkerPlan, data: Data) -> None:
        torch.manual_seed(plan.seed)
        layout, device = Layout(PromptMaker(FileTokenizer(plan.thinker))), torch.device(plan.device)
        self.media, self._exam_media = Media(data.pool, device), Media(data.exam, device)
        asked = Conversations(data.pool, Split.TRAIN, plan.mix, data.typed, data.texts)
        batcher = Batcher(asked, layout, data.pool, plan.seed, plan.size, plan.most_tokens)
        held_out = Conversations(data.exam, Split.HELD_OUT, plan.mix, data.exam.spoken, data.exam_texts)
        exam, generated = (
            Batcher(held_out, layout, data.exam, seed, count, plan.most_tokens // 4)
            for seed, count in enumerate((plan.exam, plan.generated))
        )
        self._codes = data.codes
        self._generated = generated[0]
        learner = Learner(trained_thinker(plan.thinker).to(device))
        if plan.init is not None:
            learner.begin_with(plan.init)
        super().__init__(
            plan, learner,
            TalkerBatches(batcher, data.codes, data.durations, plan.seed, MISHEARD),
            TalkerBatches(exam, data.codes, data.durations, plan.seed, 0.0)[0],
        )  # fmt: skip

    def losses(self, given: tuple[Batch, TalkerBatch], seed: int) -> dict[str, torch.Tensor]:
        logits, pointing = self.learner(*given, self.media, seed)
        targets = to_device(given[1].targets, self._device)
        return {"loss": cross_entropy(logits.float(), targets, reduction="sum"), "pointing": pointing}

    def counts(self, given: tuple[Batch, TalkerBatch]) -> dict[str, int]:
        speech = given[1]
        said = int((speech.tokens_of[:, 1] > 0).sum())
        return {"loss": len(speech.targets), "pointing": said}

    def guesses(self, given: tuple[Batch, TalkerBatch], seed: int) -> Guesses:
        batch, speech = given
        logits, _ = self.learner(batch, speech, self._exam_media, seed)
        return Guesses(logits.argmax(1), speech.targets, speech.owners, batch.kinds)

    def examine(self) -> dict[str, float]:
        """Where the right codes are before each; then what it says by itself."""
        return {**super().examine(), **self.generated()}

    def generated(self) -> dict[str, float]:
        """Of held-out texts: the share that comes out whole, that ends, and wrong codes to each right one."""
        whole = ended = wrong = right = 0
        self.learner.eval()
        for number, batch in enumerate(self._generated):
            asked = [self._codes[plain(reply.text)] for reply in batch.replies]
            voices = [VOICES[place % len(VOICES)] for place in range(len(asked))]
            most = int(LONGEST * max(map(len, asked)))
            with self._autocast():
                made = generate(self.learner, batch, voices, self._exam_media, most, seed=number)
            whole += sum([*each.codes] == [*codes] for each, codes in zip(made, asked, strict=True))
            ended += sum(each.has_ended for each in made)
            wrong += sum(mistakes(each.codes, codes) for each, codes in zip(made, asked, strict=True))
            right += sum(map(len, asked))
        self.learner.train()
        count = max(1, sum(len(batch.replies) for batch in self._generated))
        return {
            "generated whole": whole / count,
            "generated to the end": ended / count,
            "wrong codes": wrong / max(1, right),
        }

    def weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {WEIGHTS: halved(self.learner.talker, "talker")}


def trained_thinker(folder: Path) -> Any:
    thinker = Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config)
    weights = load_file(made_by("thinker", folder / THINKER_WEIGHTS))
    thinker.load_state_dict({name.removeprefix("thinker."): each for name, each in weights.items()})
    return thinker


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """`typed`: questions. `texts`: what is read aloud. `codes`: of all answers and texts, the held-out ones' too.

    `durations`: of the words, in what is trained.
    """

    pool: Pool
    typed: Sequence[Item]
    texts: Texts
    exam: Pool
    exam_texts: Texts
    codes: Codes
    durations: Durations

    @classmethod
    def made(cls, plan: TalkerPlan) -> Data:
        make = partial(make_pool, Split.TRAIN, plan.pieces, plan.pictures, plan.seed)
        pool = kept_pool(plan.pool, make)
        exam = make_pool(Split.HELD_OUT, plan.exam, max(1, plan.exam // 8), plan.seed)
        typed = [*islice(items(Split.TRAIN, plan.seed), plan.items)]
        texts = drawn_texts(plan.texts, Split.TRAIN, plan.seed)
        trained = _said([*typed, *pool.spoken, *pool.shown], texts)
        exam_texts = drawn_texts(plan.exam, Split.HELD_OUT, plan.seed, but=trained)
        said = trained | _said([*exam.spoken, *exam.shown], exam_texts)
        codes = codes_of_texts(said, plan.codebook, plan.codes or plan.out / CODES)
        durations = Durations.measured({text: its for text, its in codes.items() if text in trained})
        return cls(
            pool=pool, typed=typed, texts=texts, exam=exam, exam_texts=exam_texts, codes=codes, durations=durations
        )


def _said(answered: Iterable[Item], read: Texts) -> set[str]:
    return {*(item.answer for item in answered), *chain.from_iterable(read.values())}


def prepare(plan: TalkerPlan) -> Data:
    plan.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    data = Data.made(plan)
    print(f"{len(data.codes)} texts and {len(data.pool.spoken)} sounds in {time.monotonic() - began:.0f} s", flush=True)
    return data


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = trainer_options("Trains the toy's talker.", "most-tokens", "items", "texts", "generated")
    parser.add_argument("--thinker", type=Path, required=True, help="the folder of a trained thinker")
    parser.add_argument("--codebook", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="a folder with the weights that are begun with")
    parser.add_argument("--codes", type=Path, help="a file that keeps the texts' codes for the next run")
    parser.add_argument("--prepare", action="store_true", help="only fills the pool and the codes, for runs to come")
    chosen = given_options(parser)
    is_prepared_only = chosen.pop("prepare")
    plan = TalkerPlan(**chosen)
    data = prepare(plan)
    if not is_prepared_only:
        TalkerTrainer(plan, data).train()


if __name__ == "__main__":
    main()
