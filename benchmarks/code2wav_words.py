"""How many of the toy's answers are understood, by precision, points of time, chunks and look-ahead of code2wav alone.

    python -m benchmarks.code2wav_words --codebook .cache/wave/codebook.pt [--answers 60] [--device cuda]

Each held-out answer has the codes of espeak-ng's speech, which the codebook of the training gives, in both voices. A
variant is compared with the first one, answer by answer: understood in one alone, and in dB of the waveform. It needs
espeak-ng and the extra `training`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.sound import SoundJob
from training.codes import Codebook
from training.pairs import Turned, likeness_db
from training.recogniser import Recogniser
from training.saying import ANSWER_HZ, SPEAKERS
from training.wave_data import texts
from training.world import Split

BLOCK_CODES, CODE_SAMPLES = 12, 480
SHIPPED = {"num_steps": 5, "max_streams": 1}


@dataclass(frozen=True)
class Variant:
    """`blocks`: of the first chunks of a stream, and of all behind them the last of these; none: not streamed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[int, ...] = (1, 1, 1, 2, 4, 8)
    look_ahead: int = BLOCK_CODES


VARIANTS = {
    "as shipped": Variant(),
    "not streamed": Variant(blocks=()),
    "look-ahead 6": Variant(look_ahead=6),
    "look-ahead 3": Variant(look_ahead=3),
    "look-ahead 1": Variant(look_ahead=1),
    "chunks of 1 block": Variant(blocks=(1,)),
    "flow float8": Variant({"dtype": "float8"}),
    "flow bfloat16": Variant({"dtype": "bfloat16"}),
    "vocoder float16": Variant({"vocoder_dtype": "float16"}),
    "vocoder bfloat16": Variant({"vocoder_dtype": "bfloat16"}),
    **{f"num_steps {steps}": Variant({"num_steps": steps}) for steps in (10, 4, 3, 2)},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code2wav_words", description=__doc__)
    parser.add_argument("--codebook", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="beside the first")
    asked = parser.parse_args()
    codebook, recogniser = Codebook.load(asked.codebook), Recogniser()
    codes = {text: np.array(codebook.codes_of(text), np.int16) for text in texts(asked.answers, Split.HELD_OUT)}
    base: tuple[list[np.ndarray], list[bool]] | None = None
    for name in dict.fromkeys(["as shipped", *asked.only]):
        sounds = list(made(VARIANTS[name], codes, torch.device(asked.device)))
        said = [text for text in codes for _ in SPEAKERS]
        right = [recogniser.text(sound, ANSWER_HZ) == text for sound, text in zip(sounds, said, strict=True)]
        base = base or (sounds, right)
        flags = list(zip(base[1], right, strict=True))
        turned = Turned(lost=flags.count((True, False)), gained=flags.count((False, True)))
        like = np.median([likeness_db(*each) for each in zip(base[0], sounds, strict=True)])
        counts = f"{sum(right)} of {len(right)} | - / + {turned.lost} / {turned.gained}, chance {turned.chance:.2f}"
        print(f"{name:20} | {counts} | {like:.1f} dB", flush=True)


def made(variant: Variant, codes: Mapping[str, np.ndarray], device: torch.device) -> Iterator[np.ndarray]:
    """The sound of each answer in each voice."""
    folder = Qwen2_5Omni.embedded_checkpoint("toy")
    model = Code2WavModel(folder, load_voices(folder), device, Code2WavOptions(**SHIPPED | dict(variant.options)))
    for seed, values in enumerate(codes.values()):
        for voice in SPEAKERS:
            yield np.concatenate([sound_of(model, job) for job in jobs(variant, values, voice, seed)])
            model.forget(["stream"])


def sound_of(model: Code2WavModel, job: SoundJob) -> np.ndarray:
    model.begin(0, job)
    for _ in range(model.steps):
        model.step([0])
    return model.finish([0])[0]


def jobs(variant: Variant, codes: np.ndarray, voice: str, seed: int) -> Iterator[SoundJob]:
    for start, end, look_ahead in chunks(variant, len(codes)):
        part = codes[start : end + look_ahead, None]
        samples, size = range(start * CODE_SAMPLES, end * CODE_SAMPLES), 2 * len(part)
        stream = "stream" if variant.blocks else None
        yield SoundJob(part, samples, size, voice=voice, seed=seed, stream=stream, look_ahead=look_ahead)


def chunks(variant: Variant, count: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of each, and the codes that it sees behind: those that the session of a full talker makes."""
    start = 0
    for number in range(count):
        most = variant.blocks[min(number, len(variant.blocks) - 1)] * BLOCK_CODES if variant.blocks else count
        left = count - start
        if left <= max(most, BLOCK_CODES + variant.look_ahead - 1):
            yield start, count, 0
            return
        size = min((left - variant.look_ahead) // BLOCK_CODES * BLOCK_CODES, most)
        yield start, start + size, variant.look_ahead
        start += size


if __name__ == "__main__":
    main()
