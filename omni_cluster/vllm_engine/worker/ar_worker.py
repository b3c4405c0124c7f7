"""vLLM's worker for this platform, with our model runner in place of the stock one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from vllm.platforms import current_platform

from omni_cluster.vllm_engine import drawn_weights  # noqa: F401 - makes a load format known
from omni_cluster.vllm_engine.install import replaced, search_no_garbage_at_exit
from omni_cluster.vllm_engine.worker.ar_model_runner import GPUARModelRunner
from omni_cluster.vllm_engine.worker.cpu_lora import spare_the_base_model
from omni_cluster.vllm_engine.worker.eager_sampling import sample_eagerly

__all__ = ["RUNNER", "GPUARWorker", "PlatformWorker"]

# Where vLLM's worker looks up the class of its runner.
RUNNER: tuple[ModuleType, str]
if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker

    from omni_cluster.vllm_engine.worker.cpu_worker import CPUWorker as PlatformWorker

    RUNNER = (cpu_worker, "CPUModelRunner")
else:
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker  # type: ignore[no-redef]

    RUNNER = (gpu_model_runner, "GPUModelRunner")


class GPUARWorker(PlatformWorker):
    """An autoregressive stage's worker.

    vLLM has no hook for the runner's class: `init_device` looks it up by name, so the name is ours while it runs.
    """

    def init_device(self) -> None:
        search_no_garbage_at_exit()
        sample_eagerly()
        if self.lora_config is not None and current_platform.is_cpu():
            spare_the_base_model()
        if self.model_config.dtype == torch.float32 and not current_platform.is_cpu():
            keep_float32_products()
        if self.model_config.is_moe and not current_platform.is_cpu():
            # A model without experts needs none of what this imports.
            from omni_cluster.vllm_engine.worker.expert_kernel import compile_for_any_count

            compile_for_any_count()
        with replaced(*RUNNER, GPUARModelRunner):
            super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if not current_platform.is_cpu():
            # The scheduler names blocks to clear; vLLM makes this ready only for models of its own choice.
            self.model_runner._init_kv_zero_meta()
            self.model_runner._kv_block_zeroer.warmup(kv_cache_config.num_blocks)


def keep_float32_products() -> None:
    """Who asks for float32 gets it in this process: Triton's attention and cuDNN would round factors to TF32."""
    from triton import knobs

    language: Any = knobs.language
    language.fp32_default = "ieee"
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
