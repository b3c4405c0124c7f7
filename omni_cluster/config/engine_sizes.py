"""Engine arguments of a stage that its memory is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_cluster.config.problems import Problem

USUAL: Final = {"max_model_len": 32_768, "max_num_seqs": 64, "max_num_batched_tokens": 2_048, "block_size": 16}
AS_LONG_AS_FITS: Final = -1
"""vLLM's word for a `max_model_len`."""


def size_problems(engine_args: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with those that are set."""
    problems = []
    for name, usual in USUAL.items():
        size = engine_args.get(name)
        is_word = name == "max_model_len" and size == AS_LONG_AS_FITS
        if not (size is None or is_word or (type(size) is int and size > 0)):
            fix = f"it must be a whole number above 0, for example {usual}"
            problems.append(Problem(f"engine_args.{name}", size, fix))
    limits = engine_args.get("limit_mm_per_prompt")
    if not (limits is None or (isinstance(limits, dict) and all(map(_is_limit, limits.values())))):
        fix = "it must be a mapping of whole numbers, for example {'audio': 64, 'image': 16, 'video': 4}"
        problems.append(Problem("engine_args.limit_mm_per_prompt", limits, fix))
    return problems


def _is_limit(given: object) -> bool:
    """A number of items, or vLLM's mapping of a `count` and what items come to."""
    count = given.get("count", 1) if isinstance(given, dict) else given
    return type(count) is int and count >= 0
