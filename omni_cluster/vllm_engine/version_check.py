"""Whether the installed vLLM has what we use of it, said in one sentence before an engine is started."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omni_cluster.types.errors import VersionError
from omni_cluster.vllm_engine.members import has_member, looks_up, signature_of
from omni_cluster.vllm_engine.relied_on import CHECKED_VLLM, EVERYWHERE, LOOKED_UP, ON_CPU, ON_CUDA, Names

logger = logging.getLogger(__name__)

SIGNATURES = Path(__file__).parent / "signatures.json"
"""Of `EVERYWHERE`: how the functions and methods are called in the checked version, by `module:name.member`."""


def check_vllm() -> None:
    """Raises VersionError for a vLLM without a name that we use, with one that is called in another way, or without
    what it computes with on a CPU.

    Warns of another version that has them all.
    """
    from vllm.platforms import current_platform

    on_platform = ON_CPU if current_platform.is_cpu() else ON_CUDA
    check_names({**EVERYWHERE, **on_platform}, json.loads(SIGNATURES.read_text()))
    _refuse_first(_not_looked_up(LOOKED_UP))
    if current_platform.is_cpu():
        _refuse_without_kernels()
    _warn_of(_installed())


def check_names(names: Names, signatures: Mapping[str, str]) -> None:
    """Raises VersionError for the first name that the installed vLLM does not have, or has with another signature."""
    _refuse_first(_missing(names))
    for name, now in signatures_of(names).items():
        if now != signatures.get(name, now):
            raise VersionError(
                f"vLLM {_installed()} has {_short(name)}{now}, but omni_cluster was checked with vLLM {CHECKED_VLLM}, "
                f"which has {_short(name)}{signatures[name]}; install that."
            )


def signatures_of(names: Names) -> dict[str, str]:
    """How the functions and methods among these are called in the installed vLLM, by `module:name.member`."""
    found = {}
    for path, members in names.items():
        module, _, name = path.partition(":")
        found[path] = signature_of(importlib.import_module(module), name)
        found |= {f"{path}.{member}": signature_of(_found(module, name), member) for member in members}
    return {path: signature for path, signature in found.items() if signature is not None}


def _short(path: str) -> str:
    return path.partition(":")[2]


def _refuse_first(missing: Iterator[str]) -> None:
    for name in missing:
        raise VersionError(
            f"vLLM {_installed()} has no {name}; omni_cluster was checked with vLLM {CHECKED_VLLM}, install that."
        )


def _refuse_without_kernels() -> None:
    """vLLM itself goes on with a warning, until something calls one."""
    import torch  # here, as vLLM: processes without an engine import this module too

    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        raise VersionError(
            f"vLLM {_installed()} could not load its library for CPUs, and says why in its line 'Failed to import'; "
            "where that is libnuma.so.1, install it: Debian and Ubuntu have it as libnuma1."
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
