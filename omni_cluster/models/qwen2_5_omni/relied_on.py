"""What the models use of vLLM that vLLM does not promise to keep; compared with the installed version at a start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omni_cluster.kernels.relied_on import DECODER

_MODEL = "vllm.model_executor.models.qwen2_5_omni_thinker"

THINKER: Mapping[str, tuple[str, ...]] = {
    **DECODER,
    f"{_MODEL}:Qwen2_5OmniThinkerForConditionalGeneration": (
        "_process_audio_input",
        "hf_to_vllm_mapper",
        "language_model",
    ),
    f"{_MODEL}:Qwen2_5OmniThinkerMultiModalProcessor": (
        "_apply_hf_processor_main",
        "_get_hf_mm_inputs",
        "_get_mm_fields_config",
        "_get_prompt_updates",
        "_maybe_apply_prompt_updates",
    ),
    f"{_MODEL}:Qwen2_5OmniThinkerProcessingInfo": ("_get_expected_hidden_size",),
    "vllm.model_executor.models.qwen2_5_vl:Qwen2_5_VisionTransformer": ("_rope_by_thw_cache",),
}

SIGNATURES: Mapping[str, str] = json.loads((Path(__file__).parent / "signatures.json").read_text())
