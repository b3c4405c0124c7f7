"""Writes what the flow and the vocoder have learned as a checkpoint has it, and measures it.

    python -m training.code2wav --data .cache/wave --out toy

`--data` may be left out for a folder that has the files already: then it is only measured.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from omni_cluster.models.qwen2_5_omni.voices import VOICE_FILE
from training.code2wav_parts import DIT_PREFIX, VOCODER_PREFIX, new_dit, new_vocoder, weights, write
from training.codes import Codebook, cepstra, spoken_mel
from training.files import made_by
from training.recogniser import Recogniser
from training.saying import ANSWER_HZ, SPEAKERS, frames_in_time
from training.vocoder import sound_of
from training.wave_data import Sayings, texts
from training.world import Split

STEPS = 10
"""Of the flow's sampler."""


def averaged(folder: Path, part: str, model: nn.Module) -> None:
    """Gives the model the averaged weights of a training."""
    state = torch.load(made_by(part, folder / f"{part}.pt"), map_location="cpu", weights_only=True)
    average = state["parts"]["average"]
    del average["count"]
    model.load_state_dict(average)


def load(folder: Path) -> tuple[Qwen2_5OmniToken2WavDiTModel, Qwen2_5OmniToken2WavBigVGANModel]:
    """In float32, from a folder that `write` has written."""
    dit, vocoder = new_dit().eval(), new_vocoder().eval()
    for model, prefix in ((dit, DIT_PREFIX), (vocoder, VOCODER_PREFIX)):
        model.load_state_dict(weights(folder, prefix))
    return dit, vocoder


def flowed(dit: Qwen2_5OmniToken2WavDiTModel, codes: list[int], voice: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """By transformers' own sampler: `[2 n, 80]`."""
    given = torch.tensor([codes], device=dit.device)
    cond, reference = voice["cond"].to(dit.device), voice["ref_mel"].to(dit.device)
    mel: torch.Tensor = dit.sample(cond, reference, given, num_steps=STEPS)
    return mel[0].T


@torch.inference_mode()
def sounds(folder: Path, said: list[str]) -> Iterator[tuple[str, str, str, np.ndarray, float]]:
    """Text, voice, what it is made of, sound, and how far its mel frames are from the spoken ones. Raises NoEspeak."""
    dit, vocoder = load(folder)
    codebook, voices = Codebook.load(folder / "codebook.pt"), torch.load(folder / VOICE_FILE, weights_only=True)
    torch.manual_seed(0)
    for text in said:
        codes = codebook.codes_of(text)
        for speaker in SPEAKERS:
            real = spoken_mel(text, speaker)
            mel = flowed(dit, codes, voices[speaker])
            places = frames_in_time(cepstra(real).numpy(), cepstra(mel).numpy())
            yield text, speaker, "mel", sound_of(vocoder, real[None])[0].clamp(-1, 1).numpy(), 0.0
            error = float((mel - real[places]).abs().mean())
            yield text, speaker, "codes", sound_of(vocoder, mel[None])[0].clamp(-1, 1).numpy(), error


def measured(folder: Path, count: int) -> str:
    """Words right to the recogniser, of held-out answers, by stage and voice."""
    recogniser = Recogniser()
    right: dict[tuple[str, str], list[bool]] = {}
    errors: dict[str, list[float]] = {}
    for text, speaker, stage, sound, error in sounds(folder, texts(count, Split.HELD_OUT)):
        right.setdefault((stage, speaker), []).append(recogniser.text(sound, ANSWER_HZ) == text)
        errors.setdefault(stage, []).append(error)
    lines = [f"{stage} {speaker}: {sum(found)} of {len(found)} right" for (stage, speaker), found in right.items()]
    return "\n".join([*lines, f"mel error of the flow: {np.mean(errors['codes']):.3f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the toy's code2wav, and measures it.")
    parser.add_argument("--data", type=Path, help="the folder that flow and vocoder were trained in")
    parser.add_argument("--flow", type=Path, help="a folder that has a flow already, which is taken unchanged")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measure", type=int, default=0, help="so many held-out answers, by pocketsphinx")
    given = parser.parse_args()
    if given.data:
        dit, vocoder = new_dit(), new_vocoder()
        if given.flow:
            dit.load_state_dict(weights(given.flow, DIT_PREFIX))
        else:
            averaged(given.data, "flow", dit)
        averaged(given.data, "vocoder", vocoder)
        write(given.out, dit, vocoder, Sayings.load(given.data).voices)
        shutil.copy(given.data / "codebook.pt", given.out)
    if given.measure:
        print(measured(given.out, given.measure))


if __name__ == "__main__":
    main()
