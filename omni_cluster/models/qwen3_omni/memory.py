"""What the memory of code2wav is computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_cluster.memory.needs import DTYPE_BYTES
from omni_cluster.memory.sizes import SoundSizes, StoredWeights, WeightGroup
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen3_omni.code2wav import PASS_ROWS, Reach
from omni_cluster.models.qwen3_omni.options import Code2WavOptions

WIDEST_TENSORS = 6
"""As large as the largest one that are alive at once in a pass: 5.5 by tracing passes on the meta device."""
SOUND_COPIES = 3
"""Of a whole answer's sound, in float32: its parts, those joined, and those on their way to the host."""


def code2wav_sizes(folder: Path, options: Code2WavOptions) -> SoundSizes:
    config = _config(folder)
    reach, dtype = Reach.of(config.upsampling_ratios, config.upsample_rates), DTYPE_BYTES[options.dtype]
    state = state_elements(config, reach.context) * dtype
    # New states of a step's streams are beside those before them until nothing of the step can fail.
    of_a_step = PASS_ROWS * row_elements(config) * dtype + options.max_batch_size * state
    answer_bytes = SOUND_COPIES * reach.samples_per_code * DTYPE_BYTES["float32"]
    return SoundSizes(
        options=options,
        weights=(StoredWeights((WeightGroup("code2wav."),), dtype),),
        state_bytes=state,
        activation_bytes=lambda codes: of_a_step + codes * answer_bytes,
        has_graphs=options.cuda_graphs,
    )


def _config(folder: Path) -> Any:
    """Read by transformers, which knows the defaults of what a checkpoint leaves out."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

    return Qwen3OmniMoeCode2WavConfig(**read_config(folder)["code2wav_config"])


def state_elements(config: Any, context: int) -> int:
    """Keys and values of the codes that a later one sees, and rows that the convolutions see again."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    a_code: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return a_code * (config.sliding_window - 1) + int(context * config.hidden_size)


def row_elements(config: Any) -> int:
    """Of one row of a pass: `WIDEST_TENSORS` as the widest of the decoder's blocks makes, channels x samples a row."""
    channels, samples, widest = int(config.decoder_dim), 1, 0
    for ratio in config.upsampling_ratios:
        samples *= ratio
    for rate in config.upsample_rates:
        channels, samples = channels // 2, samples * rate
        widest = max(widest, channels * samples)
    return WIDEST_TENSORS * widest
