"""Milliseconds of the audio tower of the Omni 7B, beside transformers' own, by the sounds of a call.

    python -m benchmarks.audio_tower [--calls 20]

On the card in bfloat16, where the layers are captured; on a CPU in float32, with two layers. Random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from omni_cluster.models.qwen2_5_omni.audio_tower import Hearing

SOUNDS_S = ([0.3], [1.0], [10.0], [10.24], [30.0], [10.0] * 8, [300.0])
FRAMES_A_SECOND = 100
WIDTHS = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "output_dim": 3584}
Hear = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]


def made_tower(device: str) -> Qwen2_5OmniAudioEncoder:
    torch.manual_seed(0)
    config = Qwen2_5OmniAudioEncoderConfig(**WIDTHS, encoder_layers=32 if device == "cuda" else 2)
    return Qwen2_5OmniAudioEncoder(config).eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def of_transformers(tower: Qwen2_5OmniAudioEncoder) -> Hear:
    def hear(features: torch.Tensor, lengths: torch.Tensor) -> Sequence[torch.Tensor]:
        there = lengths.to(features.device)  # as vLLM calls it
        after_cnn, tokens = tower._get_feat_extract_output_lengths(there)
        made = tower(features.to(tower.dtype), feature_lens=there, aftercnn_lens=after_cnn)
        return made.last_hidden_state.split(tokens.tolist())  # type: ignore[no-any-return]

    return hear


def call_ms(hear: Hear, features: torch.Tensor, lengths: torch.Tensor, calls: int) -> float:
    taken = []
    for _ in range(3 + calls):
        began_s = time.perf_counter()
        float(hear(features, lengths)[0].sum())  # waits for the card
        taken.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(taken[3:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stock, hearing = of_transformers(made_tower(device)), Hearing(made_tower(device))
    hearing.capture()
    print("| sounds | transformers', ms | ours, ms | largest relative difference |\n|---|---|---|---|")
    for sounds_s in SOUNDS_S:
        lengths = torch.tensor([round(FRAMES_A_SECOND * sound_s) for sound_s in sounds_s])
        features = torch.randn(128, int(lengths.sum()), device=device)
        pairs = zip(hearing(features, lengths), stock(features, lengths), strict=True)
        differs = max(float((ours.float() - theirs.float()).norm() / theirs.float().norm()) for ours, theirs in pairs)
        theirs_ms, ours_ms = (call_ms(each, features, lengths, options.calls) for each in (stock, hearing))
        name = f"{sounds_s[0]:g} s" + (f" x {len(sounds_s)}" if len(sounds_s) > 1 else "")
        print(f"| {name} | {theirs_ms:.2f} | {ours_ms:.2f} | {differs:.2g} |", flush=True)


if __name__ == "__main__":
    main()
