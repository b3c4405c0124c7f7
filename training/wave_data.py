"""Sentences of the world as code2wav learns them: codes, sounds and mel frames of both voices, made by all cores.

python -m training.wave_data --out .cache/wave --sayings 3000
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from omni_cluster.models.qwen2_5_omni.voices import LOW_VOICE
from training.code2wav_parts import voices
from training.codes import Codebook, cepstra
from training.cores import CORES, by_cores
from training.files import made_by, written_whole
from training.mel import log_mel
from training.saying import SPEAKERS, frames_in_time, say
from training.world import Split, items

FITTED_ON = 1000
"""Sentences that a codebook is made of."""
DRAWS_A_SAYING = 30
TRAINED_DRAWS = 100_000
"""Enough for all answers but sentences to repeat, of which none is of both splits."""


@dataclass(frozen=True, slots=True)
class Sayings:
    """`codes` int16 `[n]` each; `sounds` int16 by voice and sentence; `mels` float16 `[2 n, 80]` by voice and sentence,
    in the time of the codes. Voices are in the order of `voices`.
    """

    texts: list[str]
    codes: list[np.ndarray]
    sounds: list[list[np.ndarray]]
    mels: list[list[np.ndarray]]
    voices: dict[str, dict[str, torch.Tensor]]

    @classmethod
    def load(cls, folder: Path) -> Sayings:
        return cls(**torch.load(made_by("wave_data", folder / "sayings.pt"), weights_only=False))

    def save(self, folder: Path) -> None:
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        with written_whole(folder / "sayings.pt") as file:
            torch.save(kept, file)


def texts(count: int, split: Split = Split.TRAIN) -> list[str]:
    """Different answers of the world, or fewer if it has not so many; of those held out the ones that are not trained.

    A held-out question may have the answer of another one.
    """
    trained = {*_answers(Split.TRAIN, TRAINED_DRAWS)} if split is Split.HELD_OUT else ()
    drawn = dict.fromkeys(_answers(split, count * DRAWS_A_SAYING))
    return list(itertools.islice((text for text in drawn if text not in trained), count))


def _answers(split: Split, count: int) -> Iterator[str]:
    return (item.answer for item in itertools.islice(items(split, seed=0), count))


def spoken(text: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sounds and mels by voice, the mels in the time of the low voice's codes."""
    torch.set_num_threads(1)
    sounds = {speaker: say(text, speaker) for speaker in SPEAKERS}
    mels = {speaker: log_mel(torch.from_numpy(sound)[None])[0] for speaker, sound in sounds.items()}
    timing = cepstra(mels[LOW_VOICE]).numpy()
    for speaker, mel in mels.items():
        if speaker != LOW_VOICE:
            mels[speaker] = mel[frames_in_time(cepstra(mel).numpy(), timing)]
    return (
        [(sound * (2**15 - 1)).astype(np.int16) for sound in sounds.values()],
        [mel.numpy().astype(np.float16) for mel in mels.values()],
    )


def made(said: Sequence[str], codebook: Codebook | None = None, cores: int = CORES) -> tuple[Sayings, Codebook]:
    """With a codebook of the first of them where none is given. Raises NoEspeak."""
    parts = list(by_cores(spoken, said, cores))
    sounds, mels = ([list(of_voice) for of_voice in zip(*(part[i] for part in parts), strict=True)] for i in (0, 1))
    low = [torch.from_numpy(mel).float() for mel in mels[list(SPEAKERS).index(LOW_VOICE)]]
    codebook = codebook or Codebook.fitted(low[:FITTED_ON])
    codes = [np.array(codebook.codes(mel), np.int16) for mel in low]
    return Sayings(list(said), codes, sounds, mels, voices()), codebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes what code2wav is trained on.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sayings", type=int, default=3000)
    parser.add_argument("--codebook", type=Path, help="one that is made already")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sayings, codebook = made(texts(given.sayings), Codebook.load(given.codebook) if given.codebook else None)
    codebook.save(given.out / "codebook.pt")
    sayings.save(given.out)  # last: where it is, all is
    seconds = sum(map(len, sayings.codes)) / 50
    print(f"{len(sayings.texts)} sentences of {seconds / 60:.1f} minutes, in {len(sayings.mels)} voices")


if __name__ == "__main__":
    main()
