"""The toy's code2wav: its sizes, its parts as transformers has them, and the files that a checkpoint has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig, Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from omni_cluster.models.qwen2_5_omni.voices import VOICE_FILE
from omni_cluster.types.errors import ConfigError
from training import codes
from training.saying import SPEAKERS

DIT_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64, "emb_dim": 64,
    "num_embeds": codes.SIZE - 1, "look_ahead_layers": [1], "look_backward_layers": [0, 2], "enc_dim": 32,
    "enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 16, "enc_res2net_scale": 2, "enc_se_channels": 16,
    "dropout": 0.0,
}  # fmt: skip
"""transformers' table of codes has one row more than `num_embeds`."""
VOCODER_SIZES: Final[dict[str, Any]] = {
    "upsample_initial_channel": 128, "upsample_rates": [6, 5, 8], "upsample_kernel_sizes": [12, 11, 16],
    "resblock_kernel_sizes": [3, 5, 7],
}  # fmt: skip
TOKEN2WAV: Final = {"dit_config": DIT_SIZES, "bigvgan_config": VOCODER_SIZES}
"""As the checkpoint's configuration has it, `token2wav_config`."""
WEIGHTS_FILE: Final = "token2wav.safetensors"
DIT_PREFIX: Final = "token2wav.code2wav_dit_model."
VOCODER_PREFIX: Final = "token2wav.code2wav_bigvgan_model."
REFERENCE_SAYING: Final = "hello i am a toy"
REFERENCE_FRAMES: Final = 100


def new_dit() -> Qwen2_5OmniToken2WavDiTModel:
    """It begins as nothing at all: every layer's gate and the output are zero."""
    dit = Qwen2_5OmniToken2WavDiTModel._from_config(Qwen2_5OmniDiTConfig(**DIT_SIZES), attn_implementation="sdpa")
    for module in dit.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for block in dit.transformer_blocks:
        nn.init.zeros_(block.attn_norm.linear.weight)
    for last in (dit.norm_out.linear, dit.proj_out):
        nn.init.zeros_(last.weight)
    return dit


def new_vocoder() -> Qwen2_5OmniToken2WavBigVGANModel:
    vocoder = Qwen2_5OmniToken2WavBigVGANModel(Qwen2_5OmniBigVGANConfig(**VOCODER_SIZES))
    for module in vocoder.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            module.reset_parameters()
    return vocoder


def voice(number: int, speaker: str) -> dict[str, torch.Tensor]:
    """What the flow is told of a voice: `cond` `[1, 192]`, `ref_mel` `[1, 100, 80]`. Raises NoEspeak."""
    given = torch.randn(1, 192, generator=torch.Generator().manual_seed(number))
    return {"cond": given, "ref_mel": codes.spoken_mel(REFERENCE_SAYING, speaker)[None, :REFERENCE_FRAMES]}


def voices() -> dict[str, dict[str, torch.Tensor]]:
    return {speaker: voice(number, speaker) for number, speaker in enumerate(SPEAKERS)}


def write(folder: Path, dit: nn.Module, vocoder: nn.Module, of_voices: dict[str, dict[str, torch.Tensor]]) -> None:
    """`token2wav.safetensors` by the hub's names in float16, and `spk_dict.pt` without each voice's `bos_token`."""
    parts = {DIT_PREFIX: dit, VOCODER_PREFIX: vocoder}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name: tensor.detach().to("cpu", torch.float16).contiguous()
               for prefix, part in parts.items() for name, tensor in part.state_dict().items()}  # fmt: skip
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    torch.save(of_voices, folder / VOICE_FILE)


def weights(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Of one part, in float32, from a folder that `write` has written or from the joined toy.

    Raises ConfigError where there are none.
    """
    if not (file := folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{folder} has no {WEIGHTS_FILE}: give the folder of a trained code2wav.")
    return {name.removeprefix(prefix): tensor.float()
            for name, tensor in load_file(file).items() if name.startswith(prefix)}  # fmt: skip
