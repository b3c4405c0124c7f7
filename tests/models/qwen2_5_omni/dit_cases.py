"""Inputs of the DiT's blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from omni_cluster.models.qwen2_5_omni.dit import (
    BlockDiT,
    PackedBlocks,
)
from omni_cluster.models.qwen2_5_omni.flow import evaluation_times
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.models.qwen2_5_omni.voices import load_voices

SIZE = 24


SLOTS = 4


def make_dit(
    folder: Path,
    device: str,
    dtype: torch.dtype = torch.float32,
    resident_blocks: int = 0,
    in_float8: bool = False,
) -> BlockDiT:
    place = torch.device(device)
    model = load_token2wav(folder, place).code2wav_dit_model
    voices, times = list(load_voices(folder).values()), evaluation_times(place)
    return BlockDiT(model, voices, times, dtype, SLOTS, resident_blocks, in_float8)


def blocks(
    previous: list[int], following: list[int], length: list[int], keep: list[int], device: str = "cpu"
) -> PackedBlocks:
    return PackedBlocks.of(torch.from_numpy(table(previous, following, length, keep)).to(device))


def table(previous: list[int], following: list[int], length: list[int], keep: list[int]) -> np.ndarray:
    voice = [i % 2 for i in range(len(length))]
    codes = [[code] * len(length) for code in range(12)]
    return np.array([previous, following, length, keep, voice, [0] * len(length), *codes], np.int32)
