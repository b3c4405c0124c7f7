"""Joins the toy's trained parts to one checkpoint in the hub's layout.

    python -m training.join --thinker FOLDER --talker FOLDER --code2wav FOLDER --out toy

The folders are those that the trainings of the parts have filled; they may be one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from omni_cluster.models.checkpoint_maker import check_vacant, renamed_when_whole, write_index
from omni_cluster.models.qwen2_5_omni.checkpoint import write_configs
from omni_cluster.models.qwen2_5_omni.voices import VOICE_FILE
from omni_cluster.types.errors import ConfigError
from training.checkpoint import TOKENS, toy_config
from training.code2wav_parts import WEIGHTS_FILE as CODE2WAV_WEIGHTS
from training.talker import WEIGHTS as TALKER_WEIGHTS
from training.thinker import WEIGHTS as THINKER_WEIGHTS

WEIGHTS: Final = {"thinker": THINKER_WEIGHTS, "talker": TALKER_WEIGHTS, "code2wav": CODE2WAV_WEIGHTS}
PARTS: Final = tuple(WEIGHTS)
PROCESSOR_FILES: Final = ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Of the thinker's folder: it was trained with these."""


def join(parts: Mapping[str, Path], out: Path) -> int:
    """Writes the checkpoint `out` of the folder of each of `PARTS`; its size in bytes.

    Raises ConfigError where a folder lacks a file, and where `out` is not empty.
    """
    check_vacant(out)
    weights = {part: load_file(_file(parts, part, WEIGHTS[part])) for part in PARTS}
    voices = torch.load(_file(parts, "code2wav", VOICE_FILE), weights_only=True)
    processor = [_file(parts, "thinker", name) for name in PROCESSOR_FILES]
    with renamed_when_whole(out) as folder:
        # Not the thinker's own: that of an earlier day may have other sizes of code2wav.
        write_configs(toy_config(), TOKENS, folder)
        for file in processor:
            shutil.copy(file, folder)
        torch.save({name: {**of, "bos_token": TOKENS.voices[name]} for name, of in voices.items()}, folder / VOICE_FILE)
        _save(weights, folder)
    return sum(file.stat().st_size for file in out.iterdir())


def _save(weights: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> None:
    """In half precision, a file a part: one that is trained again changes no other's."""
    halves = {part: {name: its[name].half() for name in sorted(its)} for part, its in weights.items()}
    for part, its in halves.items():
        save_file(its, folder / WEIGHTS[part], {"format": "pt"})
    file_of = {name: WEIGHTS[part] for part, its in halves.items() for name in its}
    write_index(file_of, sum(each.nbytes for its in halves.values() for each in its.values()), folder)


def _file(parts: Mapping[str, Path], part: str, name: str) -> Path:
    if not (file := parts[part] / name).is_file():
        raise ConfigError(f"{parts[part]} has no {name}: give the folder of a trained {part}.")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Joins the toy's trained parts to one checkpoint.")
    for part in PARTS:
        parser.add_argument(f"--{part}", type=Path, required=True, help=f"the folder of a trained {part}")
    parser.add_argument("--out", type=Path, required=True)
    given = vars(parser.parse_args())
    try:
        total = join({part: given[part] for part in PARTS}, given["out"])
    except ConfigError as error:
        sys.exit(str(error))
    print(f"{given['out']}: {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
