"""What the talker says by itself, each code the likeliest one, and how far that is from what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from training.talker_batches import END, TalkerBatch, talker_batch
from training.thinker import Media

if TYPE_CHECKING:
    from training.batches import Batch
    from training.talker import Learner


@dataclass(frozen=True, slots=True)
class Generated:
    """`has_ended`: with the end's mark, not at the longest that it may be."""

    codes: Sequence[int]
    has_ended: bool


@torch.no_grad()
def generate(
    learner: Learner, batch: Batch, voices: Sequence[str], media: Media, most: int, seed: int = 0
) -> list[Generated]:
    """Of at most `most` codes each."""
    count = len(batch.replies)
    speech = talker_batch(batch, [[0] * most] * count, voices, [[]] * count)
    rows = learner.rows(batch, media, seed)
    last = np.array([reply.begin + 1 for reply in batch.replies])
    said: list[list[int]] = [[] for _ in batch.replies]
    while not all(END in codes for codes in said) and (last + 1 < speech.rows.shape[1]).all():
        known = _up_to(speech, last)
        made = learner.logits(learner.hidden(rows, known)[0], known).argmax(1).tolist()
        last += 1
        for codes, fed, place, code in zip(said, speech.codes, last, made, strict=True):
            if END not in codes:
                fed[place] = code
                codes.append(code)
    return [Generated([code for code in codes if code != END], END in codes) for codes in said]


def _up_to(speech: TalkerBatch, last: np.ndarray) -> TalkerBatch:
    """Without what comes behind the `last` positions, of which the next codes are asked."""
    width = int(last.max()) + 1
    return replace(
        speech, rows=speech.rows[:, :width], codes=speech.codes[:, :width], positions=speech.positions[..., :width],
        before=np.arange(len(last)) * width + last,
    )  # fmt: skip


def mistakes(made: Sequence[int], right: Sequence[int]) -> int:
    """How many codes must be changed, left out or put in."""
    row = np.arange(len(right) + 1)
    for code in made:
        changed = row[:-1] + (np.asarray(right) != code)
        free = np.concatenate([[row[0] + 1], np.minimum(changed, row[1:] + 1)])
        places = np.arange(len(free))
        row = np.minimum.accumulate(free - places) + places  # and those that are put in
    return int(row[-1])
