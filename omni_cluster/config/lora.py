"""LoRA adapters as a configuration names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from omni_cluster.config.problems import Problem

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has space for: its `MaxLoRARanks`; not imported, for that takes seconds."""

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=256)]
"""What a request has as its `model`."""

RESERVED: Final[Mapping[str, str]] = {
    "enable_lora": "set advanced.lora_adapters next to engine_args instead",
    "max_cpu_loras": "remove it, all adapters of the stage are kept in memory",
    "lora_target_modules": "remove it, the adapters say what they change",
    "default_mm_loras": "remove it, a request chooses its adapter",
    "enable_tower_connector_lora": "remove it, encoders of media take no adapters",
}
"""Engine arguments that the adapters decide."""


def lora_problems(engine_args: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the sizes that may be set."""
    problems = []
    rank, number = engine_args.get("max_lora_rank"), engine_args.get("max_loras")
    if rank is not None and (isinstance(rank, bool) or rank not in LORA_RANKS):
        fix = f"it must be one of {', '.join(map(str, LORA_RANKS))}"
        problems.append(Problem("engine_args.max_lora_rank", rank, fix))
    if number is not None and not (type(number) is int and number > 0):
        fix = "it must be a whole number above 0, for example 4"
        problems.append(Problem("engine_args.max_loras", number, fix))
    return problems
