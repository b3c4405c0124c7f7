"""Which names of a library modules use, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

HOLDERS = frozenset({"runner", "_runner", "input_batch", "batch", "llm"})
"""What in the room is vLLM's by its name: its runner, a runner's batch, an engine."""


@dataclass(frozen=True)
class OwnClass:
    """A class of ours: the names of its bases, and the names that it defines."""

    bases: frozenset[str]
    defines: frozenset[str]

    def with_names_of(self, other: OwnClass | None) -> OwnClass:
        """Both in one: two modules may have a class of one name."""
        return self if other is None else OwnClass(self.bases | other.bases, self.defines | other.defines)


@dataclass
class UsedNames:
    """What `trees`, by path, use of a library."""

    trees: Mapping[str, ast.Module]
    library: str = "vllm"
    classes: dict[str, OwnClass] = field(init=False)

    def __post_init__(self) -> None:
        self.classes = {}
        for node in self._nodes(ast.ClassDef):
            self.classes[node.name] = own_class(node).with_names_of(self.classes.get(node.name))

    def _nodes(self, kind: type[Node]) -> Iterator[Node]:
        for tree in self.trees.values():
            yield from (node for node in ast.walk(tree) if isinstance(node, kind))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What is imported from the library, as `module:name` by the name that it has here."""
        return {alias.asname or alias.name: f"{m}:{alias.name}" for m, alias in self._imported()}

    def _imported(self) -> Iterator[tuple[str, ast.alias]]:
        for node in self._nodes(ast.ImportFrom):
            if (node.module or "").split(".")[0] == self.library:
                yield from ((node.module or "", alias) for alias in node.names)

    def imports(self) -> set[str]:
        """`module:name` of all that is imported from it, wherever, for types too; whole modules by their names."""
        whole = {a.name for node in self._nodes(ast.Import) for a in node.names if a.name.split(".")[0] == self.library}
        dotted = {s for s in self.strings() if s.startswith(f"{self.library}.") and ":" not in s and " " not in s}
        return {f"{module}:{alias.name}" for module, alias in self._imported()} | whole | dotted

    def members(self) -> set[str]:
        """Names of methods and attributes that are called, overridden, read or set on its objects."""
        inherited = self._inherited() | self._overridden()
        return inherited | self._private() | self._set() | self._of_parameters() | self._of_holders() | self._replaced()

    def strings(self) -> set[str]:
        return {node.value for node in self._nodes(ast.Constant) if isinstance(node.value, str)}

    def mentioned(self) -> set[str]:
        """Every attribute, function or string that is there: what is listed must be one of them."""
        attributes = {node.attr for node in self._nodes(ast.Attribute)}
        return attributes | {node.name for node in self._nodes(ast.FunctionDef)} | self.strings()

    # ------------------------------------------------------------ classes of ours that are its too

    def _lineage(self, name: str) -> set[str]:
        """The class and all that it is derived from, as far as their code is ours."""
        found, waiting = set(), [name]
        while waiting:
            found.add(name := waiting.pop())
            waiting += self.classes[name].bases - found if name in self.classes else ()
        return found

    def _derived(self) -> Iterator[tuple[ast.ClassDef, set[str]]]:
        """Classes that are derived from its, each with the names that are its own."""
        for node in self._nodes(ast.ClassDef):
            lineage = self._lineage(node.name)
            if lineage & set(self.aliases):
                yield node, {name for each in lineage & set(self.classes) for name in self.classes[each].defines}

    def _inherited(self) -> set[str]:
        used: set[str] = set()
        for node, own in self._derived():
            attributes = [n for n in ast.walk(node) if isinstance(n, ast.Attribute)]
            used |= {n.attr for n in attributes if is_name(n.value, "self")} - own
            used |= {n.attr for n in attributes if isinstance(n.value, ast.Call) and is_name(n.value.func, "super")}
        return {name for name in used if not is_special(name)}

    def _overridden(self) -> set[str]:
        """Private methods that nobody here calls: the library does."""
        methods = {m.name for node, _ in self._derived() for m in node.body if isinstance(m, ast.FunctionDef)}
        called = {n.attr for n in self._nodes(ast.Attribute) if not isinstance(n.value, ast.Call)}
        return {name for name in methods - called if is_private(name)}

    # ------------------------------------------------------------ objects of the library

    def _private(self) -> set[str]:
        return {n.attr for n in self._nodes(ast.Attribute) if is_private(n.attr)} - self._own()

    def _own(self) -> set[str]:
        return {name for each in self.classes.values() for name in each.defines}

    def _set(self) -> set[str]:
        targets = (n for n in self._nodes(ast.Attribute) if isinstance(n.ctx, ast.Store))
        return {n.attr for n in targets if not is_name(n.value, "self")} - self._own()

    def _of_parameters(self) -> set[str]:
        """Attributes of parameters that are said to be of a class of its."""
        used = set()
        for function in [*self._nodes(ast.FunctionDef), *self._nodes(ast.AsyncFunctionDef)]:
            theirs = {a.arg for a in function.args.args if self._is_theirs(a.annotation)}
            attributes = (n for n in ast.walk(function) if isinstance(n, ast.Attribute))
            used |= {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id in theirs}
        return used

    def _is_theirs(self, annotation: ast.expr | None) -> bool:
        if isinstance(annotation, ast.BinOp):
            return self._is_theirs(annotation.left)
        return isinstance(annotation, ast.Name) and annotation.id in self.aliases

    def _of_holders(self) -> set[str]:
        own = {name for _, names in self._derived() for name in names}
        return {n.attr for n in self._nodes(ast.Attribute) if last_name(n.value) in HOLDERS} - own

    def _replaced(self) -> set[str]:
        calls = (n for n in self._nodes(ast.Call) if is_name(n.func, "replaced") and len(n.args) == 3)
        return {n.args[1].value for n in calls if isinstance(n.args[1], ast.Constant)}  # type: ignore[misc]


def own_class(node: ast.ClassDef) -> OwnClass:
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and is_name(each.value, "self"):
            names.add(each.attr)
    return OwnClass(frozenset(base.id for base in node.bases if isinstance(base, ast.Name)), frozenset(names))


def is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_private(name: str) -> bool:
    return name.startswith("_") and not is_special(name)


def listed(*lists: Mapping[str, Sequence[str]]) -> set[str]:
    return {member for names in lists for members in names.values() for member in members}
