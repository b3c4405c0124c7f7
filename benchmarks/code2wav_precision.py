"""How far each precision of code2wav is from float32, and on a card how long it takes.

    python -m benchmarks.code2wav_precision FOLDER [--device cuda] [--codes 512] [--dtypes bfloat16/tfloat32 ...]

FOLDER: a checkpoint; a missing one is made with the sizes of the 7B model, random weights and code2wav's part alone.
A precision is that of the DiT and, behind the stroke, that of the vocoder. Signal-to-noise ratios are in dB of the
whole waveform: made at once, made in pieces as a stream, and of these pieces to what the same precision makes at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_cluster.models.qwen2_5_omni.checkpoint import make_checkpoint
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.sound import SoundJob

REFERENCE = "float32/float32"
BLOCK_CODES, CODE_SAMPLES = 12, 480
PIECE_BLOCKS = (1, 1, 1, 2, 4, 8)
SIZES_BLOCKS = (8, 16, 32, 64, 128)
"""Of one step, on a card."""
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code2wav_precision", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--codes", type=int, default=512)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16/tfloat32", "float8/tfloat32"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not asked.folder.exists():
        make_checkpoint("7b", asked.folder, device=asked.device, only="token2wav.")
    rows = compare(asked.folder, torch.device(asked.device), asked.codes, asked.dtypes)
    if asked.out:
        asked.out.write_text(json.dumps({"torch": torch.__version__, "device": asked.device, "rows": rows}, indent=1))


def compare(folder: Path, device: torch.device, count: int, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    whole = job_of(np.random.RandomState(0).randint(0, 8192, count))
    wanted, rows = np.empty(0), []
    for dtype in (REFERENCE, *dtypes):
        model = load(folder, device, dtype)
        at_once, in_pieces = made(model, whole), streamed(model, whole)
        wanted = at_once if dtype == REFERENCE else wanted
        row = {
            "dtype": dtype,
            "codes": count,
            "whole_db": None if dtype == REFERENCE else snr_db(at_once, wanted),
            "streamed_db": snr_db(in_pieces, wanted),
            "streamed_to_own_whole_db": snr_db(in_pieces, at_once),
        }
        if device.type == "cuda":
            row |= {f"step_ms_{blocks}_blocks": step_ms(model, blocks) for blocks in SIZES_BLOCKS}
        print(
            *(f"{name} {value:.2f}" if isinstance(value, float) else value for name, value in row.items()), flush=True
        )
        rows.append(row)
    return rows


def load(folder: Path, device: torch.device, dtype: str) -> Code2WavModel:
    dit, vocoder = dtype.split("/")
    config = Code2WavOptions.model_validate({"dtype": dit, "vocoder_dtype": vocoder, "max_streams": 2})
    return Code2WavModel(folder, load_voices(folder), device, config)


def made(model: Code2WavModel, job: SoundJob) -> np.ndarray:
    model.begin(0, job)
    for _ in range(model.steps):
        model.step([0])
    return model.finish([0])[0]


def streamed(model: Code2WavModel, whole: SoundJob) -> np.ndarray:
    """In pieces that grow, each with a block of look-ahead."""
    waves, start = [], 0
    for blocks in PIECE_BLOCKS:
        end = start + blocks * BLOCK_CODES
        if end + BLOCK_CODES >= len(whole.codes):
            break
        waves.append(made(model, piece(whole, start, end, BLOCK_CODES)))
        start = end
    waves.append(made(model, piece(whole, start, len(whole.codes), 0)))
    model.forget(["stream"])
    return np.concatenate(waves)


def piece(whole: SoundJob, start: int, end: int, look_ahead: int) -> SoundJob:
    codes = whole.codes[start : end + look_ahead]
    samples = range(start * CODE_SAMPLES, end * CODE_SAMPLES)
    return replace(whole, codes=codes, samples=samples, size=2 * len(codes), stream="stream", look_ahead=look_ahead)


def job_of(codes: np.ndarray) -> SoundJob:
    return SoundJob(codes[:, None], range(len(codes) * CODE_SAMPLES), 2 * len(codes), "Ethan", 5)


def step_ms(model: Code2WavModel, blocks: int) -> float:
    """The median of whole flows, divided by their steps."""
    job = job_of(np.full(blocks * BLOCK_CODES, 7))
    times_s = []
    for _ in range(REPEATS):
        model.begin(0, job)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(model.steps):
            model.step([0])
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)
        model.drop([0])
    return 1000 * float(np.median(times_s)) / model.steps


def snr_db(wave: np.ndarray, wanted: np.ndarray) -> float:
    return float(10 * np.log10(float((wanted**2).sum()) / float(((wave - wanted) ** 2).sum())))


if __name__ == "__main__":
    main()
