"""The autoregressive runner: vLLM's V1 runner for this platform, with rows."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_cluster.vllm_engine.worker.model_runner import OmniGPUModelRunner
from omni_cluster.vllm_engine.worker.step_rows import AsyncRowsOutput, PinnedBuffers

# The CPU runner must not be imported beside a CUDA one: it replaces torch.cuda events by placeholders.
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as PlatformModelRunner
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as PlatformModelRunner


class GPUARModelRunner(OmniGPUModelRunner, PlatformModelRunner):
    """Runs thinker-like stages (rows out) and talker-like stages (rows in, codes out)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pinned = PinnedBuffers()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples as vLLM does, and adds the step's rows to the output of the requests that want them, or its codes."""
        rows = self.take_rows()  # before super(), which clears the state of the step
        self.keep_hidden()
        output = super().sample_tokens(grammar_output)
        step = rows or self.take_codes()
        if step is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return AsyncRowsOutput(output, step, self._get_or_create_async_output_copy_stream(), self._pinned)
        if isinstance(output, ModelRunnerOutput):
            return step.attach_to(output)
        return output
