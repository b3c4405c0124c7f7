"""What a library's class or module has of what is used of it, asked without making an object of the class."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any


def has_member(owner: Any, name: str) -> bool:
    """Whether objects of a class, or a module, have it: a method, a field, or an attribute that a method sets."""
    if hasattr(owner, name):
        return True
    classes = inspect.getmro(owner) if isinstance(owner, type) else ()
    return any(name in inspect.get_annotations(cls) or name in _set_in(cls) for cls in classes)


def signature_of(owner: Any, name: str) -> str | None:
    """Of a function or method: its parameters, `=...` behind those with a default, and what it returns; else None.

    Types of parameters are left out: what a caller passes fits by its name and its place. What is returned is said
    without modules, which differ with versions of other libraries.
    """
    function = inspect.unwrap(getattr(owner, name, None))  # type: ignore[arg-type]
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return None
    signature = inspect.signature(function)
    parameters = [_bare(each) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=parameters)).replace("=Ellipsis", "=...")
    return re.sub(r"(?:\w+\.)+(?=\w)", "", text).replace("'", "")


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.empty if parameter.default is parameter.empty else ...
    return parameter.replace(annotation=parameter.empty, default=default)


@cache
def _set_in(cls: type) -> frozenset[str]:
    """Names of the attributes that the class's own methods set."""
    codes = [code for method in vars(cls).values() for code in _codes(method)]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def looks_up(method: Any, name: str) -> bool:
    """Whether a function, or one inside it, reads or sets an attribute, a global or an import of that name."""
    return any(name in code.co_names for code in _codes(method))


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
