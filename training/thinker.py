"""Trains the toy's thinker, with its towers, on conversations of the small world.

    python -m training.thinker --out FOLDER --minutes 10

The learning rate falls to nothing over `--of-minutes`, so that a training may go on in several runs: the next one finds
where the last one was. A second head reads what is said off the audio rows alone (CTC) while the thinker is trained;
without it the towers would learn to hear late. It is no part of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, log_softmax
from torch.utils.data import DataLoader
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.prompts import PromptMaker
from training.batches import TYPED_ONLY, Batch, Batcher, Conversations, Mix, examination
from training.checkpoint import TEXT_VOCABULARY, toy_config, write_toy
from training.layout import Layout
from training.pool import Pool, kept_pool, make_pool
from training.sounds import Recordings
from training.towers import hear, see
from training.world import Split

SAY_EVERY_S: Final = 20.0
STATE: Final = "thinker.pt"
WEIGHTS: Final = "thinker.safetensors"
READER: Final = "reader.safetensors"
BLANK: Final = TEXT_VOCABULARY
"""The CTC head's sign for no token."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`minutes` of this run, `of_minutes` of all runs together; at most `steps` in this one.

    `size`: conversations of a step. `pieces`, `pictures`: that are made, sounds and drawings. `init`: a folder whose
    weights are begun with.
    """

    out: Path
    minutes: float
    of_minutes: float
    steps: int = 1 << 40
    pieces: int = 60_000
    pictures: int = 12_000
    pool: Path | None = None
    init: Path | None = None
    exam: int = 600
    size: int = 768
    most_tokens: int = 65_536
    rate: float = 1.5e-3
    warm_up: int = 300
    ctc: float = 0.3
    seed: int = 0
    workers: int = 0
    device: str = "cpu"
    mix: Mix = field(default_factory=Mix)
    exam_every_s: float = 120.0


# ------------------------------------------------------------------- the model and its loss


class Learner(nn.Module):
    """The thinker, and the head that reads what is said."""

    def __init__(self, pool_device: torch.device) -> None:
        super().__init__()
        config = toy_config().thinker_config
        self.thinker = Qwen2_5OmniThinkerForConditionalGeneration(config).to(pool_device)
        self.reader = nn.Linear(config.text_config.hidden_size, TEXT_VOCABULARY + 1).to(pool_device)

    def forward(self, batch: Batch, media: Media, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[targets, vocabulary]`, and the reader's loss of all sounds."""
        device = self.reader.weight.device
        embeddings = self.thinker.model.embed_tokens(to_device(batch.ids, device))
        flat, ctc = embeddings.flatten(0, 1), torch.zeros((), device=device)
        if batch.hearings:
            features, frames = media.recordings.heard(batch.hearings, seed)
            heard = hear(self.thinker.audio_tower, features, frames)
            ctc = self._reading_loss(heard, batch, device)
            places = to_device(batch.sound_of * heard.shape[1] + batch.sound_row, device)
            rows = heard.flatten(0, 1).index_select(0, places)
            flat = flat.index_copy(0, to_device(batch.sound_to, device), rows.to(flat.dtype))
        for size, numbers in batch.shown.items():
            rows = see(self.thinker.visual, media.pictures(numbers)).flatten(0, 1)
            flat = flat.index_copy(0, to_device(batch.shown_to[size], device), rows.to(flat.dtype))
        hidden = self.thinker.model(
            inputs_embeds=flat.view_as(embeddings), position_ids=to_device(batch.positions, device), use_cache=False
        ).last_hidden_state
        foretelling = hidden.flatten(0, 1).index_select(0, to_device(batch.before, device))
        return self.thinker.lm_head(foretelling), ctc

    def _reading_loss(self, heard: torch.Tensor, batch: Batch, device: torch.device) -> torch.Tensor:
        """The sum over sounds, each by the tokens that it says."""
        likely = log_softmax(self.reader(heard).float(), dim=2).transpose(0, 1)
        targets = torch.tensor([token for said in batch.spoken for token in said], device=device)
        tokens = torch.tensor([each.tokens for each in batch.hearings])
        lengths = torch.tensor([len(said) for said in batch.spoken])
        losses = ctc_loss(likely, targets, tokens, lengths, blank=BLANK, reduction="none", zero_infinity=True)
        return (losses / lengths.to(device)).sum()


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


# ------------------------------------------------------------------- training


class Trainer:
    """One run of a training: goes on where the folder's state is, and leaves its own there."""

    def __init__(self, plan: Plan, pool: Pool, exam_pool: Pool) -> None:
        self._plan = plan
        self._device = torch.device(plan.device)
        torch.manual_seed(plan.seed)
        self._learner = Learner(self._device)
        self._optimizer = _optimizer(self._learner, plan)
        self._media = Media(pool, self._device)
        self._exam_media = Media(exam_pool, self._device)
        layout = Layout(PromptMaker(FileTokenizer(plan.out)))
        self._batcher = Batcher(
            Conversations(pool, Split.TRAIN, plan.mix), layout, pool, plan.seed, plan.size, plan.most_tokens
        )
        self._exam = _exam_batches(plan, exam_pool, layout)
        self.step, self._earlier_s = 0, 0.0
        self._log = (plan.out / "thinker.log").open("a")
        self._resume()

    def run(self) -> Mapping[str, float]:
        """Trains for the plan's minutes; the accuracies at the end, by kind."""
        began = saved = examined = time.monotonic()
        losses, tokens, since = defaultdict[str, Any](int), 0, began
        for batches in self._batches():
            now = time.monotonic()
            if now - began > 60 * self._plan.minutes or self._progress(now - began) >= 1:
                break
            for name, value in self._learn(batches, self._progress(now - began)).items():
                losses[name] += value
            tokens += sum(batch.ids.size for batch in batches)
            self.step += 1
            losses["steps"] += 1
            if now - since > SAY_EVERY_S:
                self._say_losses(losses, tokens / (time.monotonic() - since), began)
                losses, tokens, since = defaultdict(int), 0, time.monotonic()
            if now - saved > 60:
                self._save(now - began)
                saved = time.monotonic()
            if now - examined > self._plan.exam_every_s:
                self._write_weights(self.examine())
                examined = since = time.monotonic()
                tokens = 0
        self._save(time.monotonic() - began)
        self._write_weights(accuracies := self.examine())
        return accuracies

    def _batches(self) -> Iterator[list[Batch]]:
        # A loader's workers read it by step, so their number changes nothing.
        steps = range(self.step, self.step + self._plan.steps)
        return iter(
            DataLoader(
                self._batcher, sampler=steps, batch_size=None, num_workers=self._plan.workers,
                prefetch_factor=4 if self._plan.workers else None, worker_init_fn=_one_thread,
            )
        )  # fmt: skip

    def _learn(self, batches: Sequence[Batch], progress: float) -> dict[str, torch.Tensor]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.rate * _share_of_rate(self.step, self._plan.warm_up, progress)
        targets = sum(len(batch.targets) for batch in batches)
        sounds = max(1, sum(len(batch.hearings) for batch in batches))
        said = torch.zeros((), device=self._device)
        read = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches):
            with self._autocast():
                logits, ctc = self._learner(batch, self._media, seed=self.step * 64 + number)
            loss = cross_entropy(logits.float(), to_device(batch.targets, self._device), reduction="sum") / targets
            (loss + self._plan.ctc * ctc / sounds).backward()
            said += loss.detach()
            read += ctc.detach() / sounds
        norm = nn.utils.clip_grad_norm_(self._learner.parameters(), 1.0)
        if norm.isfinite():  # else one batch of many would spoil all
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"loss": said, "ctc": read, "gradient": norm}

    @torch.no_grad()
    def examine(self) -> dict[str, float]:
        """The share of items of each kind whose whole answer greedy decoding would make.

        It makes it where each token of the answer is the likeliest one behind the right tokens before it.
        """
        right, asked = Counter[str](), Counter[str]()
        self._learner.eval()
        for number, batch in enumerate(self._exam):
            with self._autocast():
                logits, _ = self._learner(batch, self._exam_media, seed=number)
            wrong = (logits.argmax(1).cpu().numpy() != batch.targets).astype(np.int64)
            mistakes = np.bincount(batch.owners, wrong, minlength=len(batch.kinds))
            asked.update(batch.kinds)
            right.update(kind for kind, count in zip(batch.kinds, mistakes, strict=True) if count == 0)
        self._learner.train()
        ways = [*asked, *({kind.split()[0] for kind in asked} - {*asked})]
        return {way: _share(way, right, asked) for way in sorted(ways)}

    # ------------------------------------------------------------------- state and words

    def _progress(self, seconds: float) -> float:
        return min(1.0, (self._earlier_s + seconds) / (60 * self._plan.of_minutes))

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()

    def _resume(self) -> None:
        path = self._plan.out / STATE
        if not path.is_file():
            self._begin()
            return
        state = torch.load(path, map_location=self._device, weights_only=True)
        self._learner.load_state_dict(state["learner"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._earlier_s = state["step"], state["seconds"]
        self._say(f"goes on at step {self.step}, {self._earlier_s:.0f} s of training")

    def _begin(self) -> None:
        if self._plan.init is None:
            return
        weights = load_file(self._plan.init / WEIGHTS)
        thinker = {name.removeprefix("thinker."): each.float() for name, each in weights.items()}
        self._learner.thinker.load_state_dict(thinker)
        self._learner.reader.load_state_dict(load_file(self._plan.init / READER))
        self._say(f"begins with the weights of {self._plan.init}")

    def _save(self, seconds: float) -> None:
        path = self._plan.out / STATE
        state = {
            "learner": self._learner.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.step,
            "seconds": self._earlier_s + seconds,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    def _write_weights(self, accuracies: Mapping[str, float]) -> None:
        """In half precision, by the hub's names."""
        weights = {f"thinker.{name}": each.half().cpu() for name, each in self._learner.thinker.state_dict().items()}
        save_file(weights, self._plan.out / WEIGHTS, metadata={"format": "pt"})
        reader = {name: each.float().cpu() for name, each in self._learner.reader.state_dict().items()}
        save_file(reader, self._plan.out / READER)
        self._say(_worded(accuracies))
        about = {"step": self.step, "accuracies": accuracies}
        (self._plan.out / "thinker.json").write_text(json.dumps(about, indent=1))

    def _say_losses(self, losses: dict[str, Any], tokens_s: float, began: float) -> None:
        steps = losses.pop("steps")
        means = ", ".join(f"{name} {float(total) / steps:.3f}" for name, total in losses.items())
        rate = self._optimizer.param_groups[0]["lr"]
        seconds = time.monotonic() - began
        self._say(f"step {self.step} at {seconds:.0f} s: {means}, rate {rate:.1e}, {tokens_s:,.0f} tokens/s")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()


def _share_of_rate(step: int, warm_up: int, progress: float) -> float:
    return min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * progress))


def _share(way: str, right: Mapping[str, int], asked: Mapping[str, int]) -> float:
    kinds = [kind for kind in asked if kind == way or kind.split()[0] == way]
    return sum(right.get(kind, 0) for kind in kinds) / sum(asked[kind] for kind in kinds)


def _worded(accuracies: Mapping[str, float]) -> str:
    return "right: " + ", ".join(f"{kind} {share:.3f}" for kind, share in accuracies.items())


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _optimizer(learner: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """Matrices alone decay, and of these not the embeddings."""
    decays: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in learner.named_parameters():
        decays[parameter.ndim > 1 and "embed_tokens" not in name].append(parameter)
    groups = [{"params": decays[True], "weight_decay": 0.05}, {"params": decays[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.97), fused=plan.device != "cpu")


def _exam_batches(plan: Plan, pool: Pool, layout: Layout) -> list[Batch]:
    conversations = Conversations(pool, Split.HELD_OUT, plan.mix)
    asked = examination(pool, conversations, plan.exam)
    if plan.mix == TYPED_ONLY:
        asked = (each for each in asked if each.kind.startswith("typed") and "shown" not in each.kind)
    return Batcher(conversations, layout, pool, 0, 0, plan.most_tokens // 4).of(list(asked))


# ------------------------------------------------------------------- command


def train(plan: Plan) -> Mapping[str, float]:
    if not (plan.out / "config.json").is_file():
        write_toy(plan.out)
    began = time.monotonic()
    makers = plan.workers and (os.cpu_count() or 1)
    spoken, shown = plan.mix.spoken or plan.mix.transcripts, plan.mix.shown
    counts = plan.pieces if spoken else 0, plan.pictures if shown else 0
    make = partial(make_pool, Split.TRAIN, *counts, plan.seed, makers)
    pool = make() if plan.pool is None else kept_pool(plan.pool, make)
    exam = make_pool(Split.HELD_OUT, plan.exam, plan.exam // 4 if shown else 0, plan.seed, makers)
    print(f"{len(pool.spoken)} sounds and {len(pool.shown)} pictures in {time.monotonic() - began:.0f} s", flush=True)
    return Trainer(plan, pool, exam).run()


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = argparse.ArgumentParser(description="Trains the toy's thinker.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of this run")
    parser.add_argument("--of-minutes", type=float, help="of all runs of this training; this one's, unless given")
    parser.add_argument("--pool", type=Path, help="a folder that keeps sounds and pictures for the next run")
    parser.add_argument("--init", type=Path, help="a folder whose weights are begun with")
    parser.add_argument("--typed-only", action="store_true", help="without sounds and pictures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("pieces", "pictures", "exam", "size", "most_tokens", "warm_up", "seed", "workers", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("rate", "ctc", "exam_every_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    typed_only = given.pop("typed_only")
    plan = Plan(**{"of_minutes": given["minutes"], **given})
    train(replace(plan, mix=TYPED_ONLY) if typed_only else plan)


if __name__ == "__main__":
    main()
