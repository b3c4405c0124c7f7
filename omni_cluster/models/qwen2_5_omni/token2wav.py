"""The checkpoint's token2wav as transformers has it: what our DiT and vocoder take their weights from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_cluster.models.checkpoint_files import load_tensors

WEIGHT_PREFIX = "token2wav."


def load_token2wav(folder: Path, device: torch.device) -> Qwen2_5OmniToken2WavModel:
    """The checkpoint's token2wav in float32 on `device`, nothing else of the checkpoint read."""
    config = Qwen2_5OmniConfig.from_pretrained(folder).token2wav_config
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = Qwen2_5OmniToken2WavModel(config)
    model.load_state_dict(load_tensors(folder, WEIGHT_PREFIX, device))
    return model.float().eval()
