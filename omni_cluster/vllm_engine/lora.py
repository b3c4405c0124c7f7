"""LoRA adapters of a stage as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from omni_cluster.config.schema import StageConfig
from omni_cluster.models.lora import LoraAdapter, at_once, most_rank
from omni_cluster.types.errors import AdapterError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def lora_args(stage: StageConfig, adapters: Sequence[LoraAdapter]) -> dict[str, Any]:
    """vLLM's engine arguments. All adapters stay in memory: one that was read again could be lost in between."""
    if not adapters:
        return {}
    rank, number = most_rank(stage, adapters), at_once(stage, adapters)
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": number,
        "max_cpu_loras": max(number, len(adapters)),
        "lora_target_modules": sorted(set[str]().union(*(each.projections for each in adapters))),
    }


def check_features(stage: StageConfig, adapters: Sequence[LoraAdapter]) -> None:
    """Raises AdapterError for a kind of LoRA that vLLM does not compute, such as DoRA."""
    for adapter in adapters:
        try:
            PEFTHelper.from_local_dir(str(adapter.folder), None).validate_legal(
                LoRAConfig(max_lora_rank=most_rank(stage, adapters))  # type: ignore[arg-type]
            )
        except (ValueError, TypeError) as error:
            raise _refused(adapter, error) from error


async def load(llm: AsyncLLM, adapters: Sequence[LoraAdapter]) -> dict[str, LoRARequest]:
    """Brings them into the engine; by name, what a request is sent with. Raises AdapterError for what vLLM refuses."""
    requests = {}
    for number, adapter in enumerate(adapters, start=1):
        request = LoRARequest(adapter.name, number, str(adapter.folder))
        try:
            await llm.add_lora(request)
        except Exception as error:
            if type(error) is not Exception:  # the engine fails, or this process: vLLM raises a bare one for a call
                raise
            raise _refused(adapter, error) from error
        requests[adapter.name] = request
    return requests


def _refused(adapter: LoraAdapter, error: Exception) -> AdapterError:
    said = str(error).rstrip(".").splitlines()
    return AdapterError(
        f"{adapter.key} is {str(adapter.folder)!r}, which vLLM refuses: {said[0] if said else 'it fails'}."
    )
