"""Whether the installed vLLM has what we use of it, said in one sentence before an engine is started."""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from omni_cluster.errors import VersionError
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


def has_member(owner: Any, name: str) -> bool:
    """Whether objects of a class, or a module, have it: a method, a field, or an attribute that a method sets."""
    if hasattr(owner, name):
        return True
    classes = inspect.getmro(owner) if isinstance(owner, type) else ()
    return any(name in inspect.get_annotations(cls) or name in _set_in(cls) for cls in classes)


@cache
def _set_in(cls: type) -> frozenset[str]:
    """Names of the attributes that the class's own methods set."""
    codes = [code for method in vars(cls).values() for code in _codes(method)]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _not_looked_up(names: Names) -> Iterator[str]:
    for path, wanted in names.items():
        module, _, function = path.partition(":")
        looked_up = {name for code in _codes(_found(module, function)) for name in code.co_names}
        yield from (f"{function} that looks up {name}" for name in wanted if name not in looked_up)


def _codes(method: Any) -> Iterator[CodeType]:
    """The method's code, without its decorators, and that of the functions in it."""
    function = inspect.unwrap(method.__func__ if isinstance(method, staticmethod | classmethod) else method)
    if inspect.isfunction(function):
        yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
