"""The rules that the code's structure keeps, read from its syntax trees; what only typing sees counts too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "omni_cluster"
MAX_FUNCTION_LINES = 80

# Imports point one way: cluster -> server -> engine -> worker -> models -> leaves; a room may always import itself.
LEAVES = frozenset({"payloads", "inputs", "outputs", "config", "errors", "media", "sampling"})
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "errors": frozenset(),
    **{leaf: LEAVES for leaf in LEAVES - {"errors"}},
    "sampling": frozenset({"errors"}),
    "models": LEAVES,
    "worker": LEAVES | {"models"},
    "engine": LEAVES | {"models", "worker"},
    "openai_api": frozenset({"errors", "outputs", "media", "sampling"}),
    "server": LEAVES | {"models", "engine", "openai_api"},
    "cluster": LEAVES | {"models", "worker", "engine", "openai_api", "server"},
    "serve_local": LEAVES | {"models", "engine", "server"},
    "demo": LEAVES | {"models", "openai_api", "cluster"},
    "bench": LEAVES | {"models", "engine"},
    "cli": LEAVES | {"models", "engine", "openai_api", "demo", "bench", "serve_local"},
    "__main__": frozenset({"cli"}),
    "deployments": frozenset({"cluster"}),
}
# Libraries that few rooms may import.
RAY_ROOMS = frozenset({"cluster"})
NOT_ON_THE_WIRE = frozenset({"ray", "vllm", "torch"})
WITHOUT_ENGINES = frozenset({"openai_api", "server"})

# No model is named outside its family.
MODEL_NAME = re.compile(r"qwen|thinker|talker|code2wav|token2wav", re.IGNORECASE)

# What may break a rule: where and what, with the reason.
ALLOWED: Mapping[str, str] = {
    "config/engine_args.py names worker": "vLLM takes its workers by dotted path, and imports them in its own process",
    "config/engine_args.py names engine": "vLLM takes scheduler and executor by dotted path, as its workers",
    "config/loader.py says 'qwen2_5_omni_tiny.yaml'": "the file of the embedded default",
    "config/schema.py says 'thinker'": "an example in an error's text",
    "config/schema.py says 'qwen2_5_omni'": "an example in an error's text",
    "server/endpoints/chat.py ChatEndpoint.chat_completions swallows": "every error becomes the client's HTTP answer",
    "server/endpoints/speech.py SpeechEndpoint.speech swallows": "every error becomes the client's HTTP answer",
    "server/endpoints/chat.py ChatEndpoint._sse swallows": "after the first byte an error is the stream's last event",
    "cluster/unread.py Answer._take swallows": "who asks for the next piece raises it",
    "engine/fan_in.py FanIn._produce swallows": "the reader of the events raises it",
    "engine/rows_pusher.py RowsPusher._errors_of_sending swallows": "every caller whose rows were sent raises it",
    "cluster/link.py Link._receive swallows": "every reader of the link raises it",
    "cluster/stage_deployment.py StageReplica._fill swallows": "the readers of the request's outbox raise it",
    "openai_api/video.py imports torch": "frames are scaled as transformers' video processor does it, to the bit",
    "engine/cards.py sets variables": "how a stage's processes share a card, and only while they are started",
    "engine/cards.py sets name": "which cards a stage's processes see, and only while they are started",
    "config/engine_args.py sets VLLM_USE_V2_MODEL_RUNNER": "vLLM has no other switch for the runner that we extend",
    "config/engine_args.py sets VLLM_WORKER_MULTIPROC_METHOD": "a forked engine could not use CUDA; results are equal",
}


@dataclass(frozen=True)
class Source:
    """One module: its path under the package, or under the root, and its tree."""

    path: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


def package_sources() -> list[Source]:
    package = ROOT / PACKAGE
    inside = [(path.relative_to(package), path) for path in package.rglob("*.py") if path != package / "__init__.py"]
    beside = [(path.relative_to(ROOT), path) for path in (ROOT / "deployments").rglob("*.py")]
    return [Source(name.as_posix(), ast.parse(path.read_text())) for name, path in sorted(inside + beside)]


SOURCES = package_sources()


def scoped(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes below `node`, each with the dotted name of the function or class that it is in."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{scope}.{child.name}".lstrip(".") if named else scope  # type: ignore[attr-defined]
        yield inner, child
        yield from scoped(child, inner)


def imported(source: Source) -> Iterator[str]:
    """Dotted names of all that a module imports, wherever it does."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def strings(source: Source) -> Iterator[str]:
    """String literals that are code: docstrings are none."""
    docstrings = {id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def identifiers(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str))


def rooms_of(names: Iterator[str]) -> set[str]:
    parts = [name.split(".") for name in names]
    return {p[1] for p in parts if p[0] == PACKAGE and len(p) > 1} | {p[0] for p in parts if p[0] == "deployments"}


# ---------------------------------------------------------------- the rules


def imports_against_the_way(source: Source) -> Iterator[str]:
    known = MAY_IMPORT[source.room] | {source.room}
    yield from (f"imports {room}" for room in rooms_of(imported(source)) - known)
    yield from (f"names {room}" for room in rooms_of(s for s in strings(source) if s.isprintable()) - known)


def relative_imports(source: Source) -> Iterator[str]:
    yield from (f"imports {name}" for name in imported(source) if name.startswith("."))


def libraries_out_of_place(source: Source) -> Iterator[str]:
    libraries = {name.split(".")[0] for name in imported(source)}
    refused = set() if source.room in RAY_ROOMS else {"ray"}
    if source.room in WITHOUT_ENGINES:
        refused |= NOT_ON_THE_WIRE
    yield from (f"imports {library}" for library in libraries & refused)


def model_names(source: Source) -> Iterator[str]:
    if source.room == "models":
        return
    yield from (f"says {name!r}" for name in {*strings(source), *identifiers(source)} if MODEL_NAME.search(name))


def long_functions(source: Source) -> Iterator[str]:
    for name, node in scoped(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name} has {lines} lines"


def swallowed_errors(source: Source) -> Iterator[str]:
    for name, node in scoped(source.tree):
        if is_swallowing_handler(node) or is_broad_suppression(node):
            yield f"{name} swallows"


def is_swallowing_handler(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not raises(node)


def is_broad_suppression(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] != "suppress":
        return False
    return any(is_broad(kind) for kind in node.args)


def is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in ast.walk(kind))


def raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def environment_writes(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_environment(node.value):
            yield f"sets {literal(node.slice)}"
        elif isinstance(node, ast.Call) and is_environment_write(node.func):
            yield f"sets {literal(node.args[0]) if node.args else 'the environment'}"


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def is_environment_write(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    on_mapping = is_environment(function.value) and function.attr in ("update", "setdefault", "pop", "clear", "popitem")
    return on_mapping or function.attr in ("putenv", "unsetenv")


def literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def classes_without_docstring(source: Source) -> Iterator[str]:
    for name, node in scoped(source.tree):
        public = not any(part.startswith("_") for part in name.split("."))
        if isinstance(node, ast.ClassDef) and public and not ast.get_docstring(node):
            yield f"{name} has no docstring"


# ------------------------------------------------------------ the rules kept

Rule = Callable[[Source], Iterator[str]]
RULES: Mapping[Rule, tuple[str, str]] = {  # each with the module and the code of a breach
    imports_against_the_way: ("models/a.py", "if TYPE_CHECKING:\n    from omni_cluster.engine.stage import Stage"),
    relative_imports: ("engine/a.py", "from . import stage"),
    libraries_out_of_place: ("openai_api/a.py", "def f():\n    import torch.nn"),
    model_names: ("engine/a.py", "if stage == 'talker': pass"),
    long_functions: ("engine/a.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    swallowed_errors: ("engine/a.py", "def f():\n    try: g()\n    except (ValueError, Exception): pass"),
    environment_writes: ("engine/a.py", "import os\nos.environ.setdefault('SEED', '1')"),
    classes_without_docstring: ("engine/a.py", "class Stage: pass"),
}
BREACHES = [
    *[(rule, path, code) for rule, (path, code) in RULES.items()],
    (imports_against_the_way, "config/a.py", "WORKER = 'omni_cluster.worker.ar_worker.GPUARWorker'"),
    (imports_against_the_way, "engine/a.py", "from omni_cluster import openai_api"),
    (imports_against_the_way, "errors.py", "import omni_cluster.config.schema"),
    (libraries_out_of_place, "engine/a.py", "from ray import serve"),
    (libraries_out_of_place, "server/endpoints/a.py", "from vllm import envs"),
    (imports_against_the_way, "server/a.py", "from omni_cluster.cluster.failures import named"),
    (model_names, "engine/a.py", "class ThinkerStage:\n    'A stage.'"),
    (swallowed_errors, "engine/a.py", "try: g()\nexcept: pass"),
    (swallowed_errors, "engine/a.py", "with contextlib.suppress(Exception): g()"),
    (environment_writes, "engine/a.py", "os.environ['SEED'] = '1'"),
    (environment_writes, "engine/a.py", "del os.environ['SEED']"),
]


def found(rule: Rule) -> set[str]:
    return {f"{source.path} {breach}" for source in SOURCES for breach in rule(source)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    assert sorted(found(rule) - set(ALLOWED)) == []


@pytest.mark.parametrize(("rule", "path", "code"), BREACHES)
def test_a_breach_is_found(rule: Rule, path: str, code: str) -> None:
    assert list(rule(Source(path, ast.parse(code))))


def test_what_is_allowed_is_still_there() -> None:
    assert sorted(set(ALLOWED) - set().union(*map(found, RULES))) == []


def test_all_rooms_are_read() -> None:
    assert {source.room for source in SOURCES} == set(MAY_IMPORT)


def test_docstrings_and_comments_may_name_a_model() -> None:
    code = '"""The thinker."""\nclass Stage:\n    """Like a talker."""\n    x = 1  # code2wav\n    """Qwen."""'
    assert not list(model_names(Source("engine/a.py", ast.parse(code))))


def test_an_error_that_is_raised_again_is_not_swallowed() -> None:
    code = "try: g()\nexcept Exception as error:\n    outbox.fail(error)\n    raise"
    assert not list(swallowed_errors(Source("engine/a.py", ast.parse(code))))
