"""Reads letters off the audio tower's rows (CTC, Graves et al. 2006).

It teaches the tower, and is no part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import nn
from torch.nn.functional import ctc_loss, log_softmax

from training.recordings import Hearing

LETTERS: Final = " abcdefghijklmnopqrstuvwxyz"
"""All that questions have. With words in their place, a tower of this size finds none for thousands of steps."""
BLANK: Final = len(LETTERS)


class Reader(nn.Module):
    """`width`: of the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Linear(width, len(LETTERS) + 1)

    def loss(self, rows: torch.Tensor, hearings: Sequence[Hearing], said: Sequence[str]) -> torch.Tensor:
        """Of rows `[n, tokens, width]`: the sum over sounds, each by its letters."""
        likely = log_softmax(self.letters(rows).float(), dim=2).transpose(0, 1)
        targets = torch.tensor([LETTERS.index(letter) for text in said for letter in text], device=rows.device)
        tokens = torch.tensor([each.tokens for each in hearings])
        lengths = torch.tensor([len(text) for text in said])
        losses = ctc_loss(likely, targets, tokens, lengths, blank=BLANK, reduction="none", zero_infinity=True)
        return (losses / lengths.to(rows.device)).sum()

    def read(self, rows: torch.Tensor, hearings: Sequence[Hearing]) -> Iterator[str]:
        """The likeliest letters of each sound."""
        for likeliest, hearing in zip(self.letters(rows).argmax(2).tolist(), hearings, strict=True):
            signs = (sign for sign, _ in groupby(likeliest[: hearing.tokens]))
            yield "".join(LETTERS[sign] for sign in signs if sign != BLANK)
