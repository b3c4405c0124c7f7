"""Whether the installed vLLM has what we use of it, said in one sentence before an engine is started."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from omni_cluster.errors import VersionError
from omni_cluster.members import has_member, looks_up
from omni_cluster.vllm_engine.relied_on import CHECKED_VLLM, EVERYWHERE, LOOKED_UP, ON_CPU, ON_CUDA, Names

logger = logging.getLogger(__name__)


def check_vllm() -> None:
    """Raises VersionError for a vLLM without a name that we use; warns of another version that has them all."""
    from vllm.platforms import current_platform

    on_platform = ON_CPU if current_platform.is_cpu() else ON_CUDA
    check_names({**EVERYWHERE, **on_platform})
    _refuse_first(_not_looked_up(LOOKED_UP))
    _warn_of(_installed())


def check_names(names: Names) -> None:
    """Raises VersionError for the first name that the installed vLLM does not have."""
    _refuse_first(_missing(names))


def _refuse_first(missing: Iterator[str]) -> None:
    for name in missing:
        raise VersionError(
            f"vLLM {_installed()} has no {name}; omni_cluster was checked with vLLM {CHECKED_VLLM}, install that."
        )


@cache
def _warn_of(installed: str) -> None:
    """Once in a process."""
    if installed.partition("+")[0] != CHECKED_VLLM:
        logger.warning(
            "vLLM %s has all names that omni_cluster uses, but was not checked; install %s if an answer is wrong.",
            installed,
            CHECKED_VLLM,
        )


def _installed() -> str:
    from vllm import __version__

    return __version__


def _missing(names: Names) -> Iterator[str]:
    for path, members in names.items():
        module, _, name = path.partition(":")
        owner = _found(module, name)
        if owner is None:
            yield f"{module}.{name}"
            continue
        yield from (f"{name}.{member}" for member in members if not has_member(owner, member))


def _found(module: str, path: str) -> Any:
    """The object at the dotted `path` in the module; None if there is none. A submodule is an object of its package."""
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None) or importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None
    return found


def _not_looked_up(names: Names) -> Iterator[str]:
    for path, wanted in names.items():
        module, _, function = path.partition(":")
        found = _found(module, function)
        yield from (f"{function} that looks up {name}" for name in wanted if not looks_up(found, name))
