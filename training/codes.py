"""Codes: which of a codebook's sounds each 20 ms of what is said is nearest to.

A codebook is made of sentences of the world. It knows the shape of a spectrum, without the pitch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from omni_cluster.models.qwen2_5_omni.voices import LOW_VOICE
from training.cores import CORES, by_cores
from training.files import written_whole
from training.mel import BINS, FRAMES_A_CODE, log_mel
from training.saying import say

NO_CODE: Final = 0
"""What the flow is given in place of a code when it is not guided, so that no sound has it."""
SILENCE: Final = 1
SIZE: Final = 512
"""Ids in all."""
CEPSTRA: Final = 24
"""Of a spectrum's shape: fewer leave out the harmonics of the pitch."""
ROUNDS: Final = 40
SWITCH: Final = 4.0
"""What another code than the one before costs, in the unit of squared distances: fewer switches are easier to learn."""


Codes = Mapping[str, Sequence[int]]
"""Of what may be said, by its text."""


class Codebook:
    """`centres` float32 `[codes, CEPSTRA]`; those of `NO_CODE` are never the nearest."""

    def __init__(self, centres: torch.Tensor) -> None:
        self.centres = centres

    @classmethod
    def fitted(cls, mels: Sequence[torch.Tensor], size: int = SIZE, seed: int = 0) -> Codebook:
        """Of mels `[2 n, 80]`, with `size` ids, both that are no sound's included."""
        given = torch.cat([shapes(mel) for mel in mels])
        silence = shapes(log_mel(torch.zeros(1, 9_600))[0])[:1]
        centres = nearest_means(given, size - 2, torch.Generator().manual_seed(seed))
        return cls(torch.cat([torch.full_like(silence, math.inf), silence, centres]))

    def codes(self, mel: torch.Tensor) -> list[int]:
        """Of frames `[2 n, 80]`: those of the least squared distances and switches together."""
        distances = torch.cdist(shapes(mel), self.centres[1:]).square()
        total, came_from = distances[0], []
        stays = torch.arange(len(self.centres) - 1)
        for distance in distances[1:]:
            best = total.argmin()
            switches = total > total[best] + SWITCH
            came_from.append(torch.where(switches, best, stays))
            total = torch.where(switches, total[best] + SWITCH, total) + distance
        way = [int(total.argmin())]
        for back in reversed(came_from):
            way.append(int(back[way[-1]]))
        return [code + 1 for code in reversed(way)]

    def codes_of(self, text: str) -> list[int]:
        """Of what is said of it, silences included, for either voice. Raises NoEspeak."""
        return self.codes(spoken_mel(text))

    def save(self, path: Path) -> None:
        torch.save(self.centres, path)

    @classmethod
    def load(cls, path: Path) -> Codebook:
        return cls(torch.load(path, weights_only=True))


def spoken_mel(text: str, speaker: str = LOW_VOICE) -> torch.Tensor:
    """`[2 n, 80]`. Raises NoEspeak."""
    return log_mel(torch.from_numpy(say(text, speaker))[None])[0]


def shapes(mel: torch.Tensor) -> torch.Tensor:
    """Of each code's frames together: `[2 n, 80]` -> `[n, CEPSTRA]`."""
    return cepstra(mel.unflatten(0, (-1, FRAMES_A_CODE)).mean(1))


def cepstra(mel: torch.Tensor) -> torch.Tensor:
    """`[n, 80]` -> `[n, CEPSTRA]`: spectra without what is as narrow as the harmonics of a voice."""
    return mel @ _cosines().T


@functools.cache
def _cosines() -> torch.Tensor:
    """`[CEPSTRA, 80]`, orthonormal: a discrete cosine transform's first part."""
    places = (torch.arange(BINS) + 0.5) * math.pi / BINS
    waves = torch.cos(torch.arange(CEPSTRA)[:, None] * places) * math.sqrt(2 / BINS)
    waves[0] /= math.sqrt(2)
    return waves


def nearest_means(given: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` means of `[n, d]`, each of what is nearest to it; all of `given` where it is not more."""
    given = given.unique(dim=0)
    if len(given) <= count:
        return given[torch.arange(count) % len(given)]
    means = _far_apart(given, count, generator)
    for _ in range(ROUNDS):
        place = torch.cdist(given, means).argmin(1)
        sums = torch.zeros_like(means).index_add_(0, place, given)
        counts = torch.bincount(place, minlength=count)[:, None]
        means = torch.where(counts > 0, sums / counts.clamp(min=1), means)
    return means


def _far_apart(given: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Where the means begin: each drawn by its squared distance to those before it."""
    places = [int(torch.randint(len(given), (1,), generator=generator))]
    distance = torch.full((len(given),), math.inf)
    for _ in range(count - 1):
        distance = torch.minimum(distance, (given - given[places[-1]]).square().sum(1))
        places.append(int(torch.multinomial(distance, 1, generator=generator)))
    return given[places]


# ------------------------------------------------------------------ of many texts


def codes_of_texts(texts: Iterable[str], codebook: Path, kept: Path, cores: int = CORES) -> Codes:
    """`kept`: the file of what is made already; of another codebook it is made anew. Raises NoEspeak."""
    made_by = hashlib.sha256(codebook.read_bytes()).hexdigest()
    codes: dict[str, Sequence[int]] = {}
    if kept.is_file() and (earlier := json.loads(kept.read_text()))["codebook"] == made_by:
        codes = earlier["codes"]
    asked = sorted({*texts})
    if lacking := [text for text in asked if text not in codes]:
        codes |= zip(lacking, by_cores(partial(_codes_of, codebook), lacking, cores), strict=True)
        with written_whole(kept) as file:
            file.write_text(json.dumps({"codebook": made_by, "codes": codes}))
    return {text: codes[text] for text in asked}


def _codes_of(codebook: Path, text: str) -> list[int]:
    torch.set_num_threads(1)
    return _loaded(codebook).codes_of(text)


@functools.cache
def _loaded(codebook: Path) -> Codebook:
    return Codebook.load(codebook)
