"""What the models use of vLLM that vLLM does not promise to keep; compared with the installed version at a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_MODEL = "vllm.model_executor.models.qwen3_omni_moe_thinker"

THINKER: Mapping[str, tuple[str, ...]] = {
    f"{_MODEL}:Qwen3OmniMoeThinkerForConditionalGeneration": (
        "_clear_deepstack_input_embeds",
        "_process_audio_input",
        "_set_deepstack_input_embeds",
        "deepstack_num_level",
        "forward",
        "language_model",
        "multiscale_dim",
    ),
    f"{_MODEL}:Qwen3OmniMoeThinkerMultiModalProcessor": (
        "_apply_hf_processor_main",
        "_get_hf_mm_inputs",
        "_get_mm_fields_config",
        "_get_prompt_updates",
        "_maybe_apply_prompt_updates",
    ),
    f"{_MODEL}:Qwen3OmniMoeThinkerProcessingInfo": ("_get_expected_hidden_size",),
    "vllm.model_executor.models.interfaces:EagleModelMixin": ("_set_aux_hidden_state_layers",),
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention": ("rotary_emb",),
}

TALKER: Mapping[str, tuple[str, ...]] = {
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": ("cos_sin_cache",),
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention": ("rotary_emb",),
}

SIGNATURES: Mapping[str, str] = json.loads((Path(__file__).parent / "signatures.json").read_text())
