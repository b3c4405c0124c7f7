"""Says at start, in one sentence, when vLLM is not the version whose private parts we rely on."""

from __future__ import annotations

import inspect

from omni_cluster.errors import VersionError

CHECKED_VLLM = "0.30.0"


def check_vllm() -> None:
    """Raises VersionError naming the version found and the first private name that is not there."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.request import Request
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    relied_on = {
        "Request.next_decode_eligible_step": "next_decode_eligible_step" in inspect.getsource(Request.__init__),
        "Scheduler.schedule by eligible step": "next_decode_eligible_step" in inspect.getsource(Scheduler.schedule),
        "Scheduler._free_request": hasattr(Scheduler, "_free_request"),
        "ExecuteModelState.hidden_states": "hidden_states" in ExecuteModelState._fields,
        "GPUModelRunner._preprocess": hasattr(GPUModelRunner, "_preprocess"),
        "GPUModelRunner._init_mrope_positions": hasattr(GPUModelRunner, "_init_mrope_positions"),
        "GPUModelRunner._gather_mm_embeddings": hasattr(GPUModelRunner, "_gather_mm_embeddings"),
        "GPUModelRunner._sample": hasattr(GPUModelRunner, "_sample"),
        "Sampler.apply_penalties": "self.apply_penalties(" in inspect.getsource(Sampler.apply_logits_processors),
        "InputBatch.generators": "self.generators" in inspect.getsource(InputBatch.__init__),
        "GPUModelRunner.discard_request_mask": "discard_request_mask" in inspect.getsource(GPUModelRunner.__init__),
        "EngineCore utility calls": hasattr(EngineCore, "add_request"),
        "OutputProcessor.process_outputs": hasattr(OutputProcessor, "process_outputs"),
    }
    missing = [name for name, found in relied_on.items() if not found]
    if missing:
        raise VersionError(
            f"vLLM {_installed()} has no {missing[0]}; omni_cluster was checked with vLLM {CHECKED_VLLM}, install that."
        )


def _installed() -> str:
    from vllm import __version__

    return __version__
