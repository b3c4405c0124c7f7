"""Rules of the code's structure that neither ruff nor import-linter has, read from its syntax trees."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "omni_cluster"
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
KERNELS = "kernels/decoder_kernels.py"

VLLM_ROOM = "vllm_engine"
PUBLIC_LAYERS = re.compile(r"vllm\.([A-Z]\w*$|config\.|model_executor\.|multimodal\.)")
TEST_TOOLS = frozenset({"unittest", "pytest", "hypothesis"})

# No model is named outside its family.
MODEL_NAME = re.compile(r"qwen|thinker|talker|code2wav|token2wav", re.IGNORECASE)
# Nor a number of one: samples a second and a code, pixels of a patch's side, token ids.
MODEL_NUMBERS = frozenset({24_000, 480, 1_920, 12.5}) | frozenset(range(151_643, 152_064))
MODEL_CONSTANTS = re.compile(r"(^|_)(SAMPLE_RATE_HZ|CODES_PER_S|CODES_A_SECOND|SAMPLES_(PER|A)_CODE|PRESETS)$")

# What may break a rule: where and what, with the reason.
ALLOWED: Mapping[str, str] = {
    "config/loader.py says 'qwen2_5_omni_toy.yaml'": "the file of the embedded default",
    "config/schema.py says 'thinker'": "an example in an error's text",
    "config/schema.py says 'qwen2_5_omni'": "an example in an error's text",
    "openai_api/realtime/session.py counts on 24000": "the rate of PCM in OpenAI's protocol",
    "openai_api/media.py fixes SAMPLE_RATE_HZ": "the rate of sound in `Media`, for all families",
    "server/routes.py add_post.answered swallows": "every error becomes the client's HTTP answer",
    "server/endpoints/chat.py ChatEndpoint._sse swallows": "after the first byte an error is the stream's last event",
    "server/endpoints/completions.py CompletionsEndpoint._sse swallows": "the same as of a chat",
    "server/endpoints/transcriptions.py TranscriptionsEndpoint._sse swallows": "the same as of a chat",
    "server/endpoints/responses.py response_events swallows": "the same as of a chat",
    "server/realtime/response.py Response._run swallows": "every error becomes the response's last events",
    "server/speech_parts.py SpokenSentence.send swallows": "every error becomes the sentence's last events",
    "server/realtime/transcriber.py write_down swallows": "every error becomes the transcription's last event",
    "cluster/unread.py Answer._take swallows": "who asks for the next piece raises it",
    "engine/fan_in.py FanIn._produce swallows": "the reader of the events raises it",
    "vllm_engine/rows_pusher.py RowsPusher._errors_of_sending swallows": "every caller whose rows were sent raises it",
    "cluster/consumer.py ReplicaConnection._receive swallows": "every reader of the connection raises it",
    "cluster/producer.py MessagePublisher._fill_with_earlier swallows": "who asked for the rows raises it",
    "cluster/row_objects.py RowsReader._read swallows": "every reader of the rows raises it",
    "cluster/stage_deployment.py StageReplica._fill swallows": "the readers of the request's log raise it",
    "cluster/stage_deployment.py imports vllm.logger": "it closes Serve's log handlers, put back right after it",
    "cluster/metrics.py imports vllm.v1.metrics.ray_wrappers.RayHistogramWrapper": "it imports Ray, as no room "
    "but cluster does",
    "cluster/metrics.py imports vllm.v1.metrics.ray_wrappers.RayPrometheusStatLogger": "the same",
    "kernels/fused_decoder.py imports vllm.forward_context.get_forward_context": "a layer learns in "
    "no other way of the step that it is in",
    "kernels/fused_decoder.py imports vllm.v1.attention.backends.flash_attn.FlashAttentionMetadata": "its "
    "kernels read the cache whose layout this one has",
    "cluster/local.py sets SLOW_START": "Serve has no other way to be told when a start is slow",
    "engine/cards.py sets variables": "how a stage's processes share a card, and only while they are started",
    "engine/cards.py sets name": "which cards a stage's processes see, and only while they are started",
    "engine/caches.py sets name": "torch, Triton and vLLM have no other way to be told a folder",
    "vllm_engine/engine_processes.py sets name": "a fork gets the variables of the process that asked for it",
    "vllm_engine/engine_args.py sets VLLM_USE_V2_MODEL_RUNNER": "vLLM has no other switch for the runner",
    "vllm_engine/engine_args.py sets VLLM_WORKER_MULTIPROC_METHOD": "a forked engine could not use CUDA",
    "vllm_engine/engine_args.py sets VLLM_XGRAMMAR_CACHE_MB": "vLLM has no other bound for grammars",
}


@dataclass(frozen=True)
class Source:
    """One module: its path under the package, or under the root, and its tree."""

    path: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


@functools.cache
def package_sources() -> list[Source]:
    package = ROOT / PACKAGE
    inside = [(path.relative_to(package), path) for path in package.rglob("*.py") if path != package / "__init__.py"]
    beside = [(path.relative_to(ROOT), path) for path in (ROOT / "deployments").rglob("*.py")]
    return [Source(name.as_posix(), ast.parse(path.read_text())) for name, path in sorted(inside + beside)]


def scoped(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes below `node`, each with the dotted name of the function or class that it is in."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{scope}.{child.name}".lstrip(".") if named else scope  # type: ignore[attr-defined]
        yield inner, child
        yield from scoped(child, inner)


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


def imported(source: Source) -> Iterator[str]:
    """Dotted names of all that a module imports, wherever it does."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


# ---------------------------------------------------------------- the rules


def modules_named(source: Source) -> Iterator[str]:
    """Import-linter sees no import by dotted path."""
    parts = [text.split(".") for text in strings(source) if text.isprintable()]
    rooms = {p[1] for p in parts if p[0] == PACKAGE and len(p) > 1}
    yield from (f"names {room}" for room in rooms - {source.room})


def vllm_out_of_place(source: Source) -> Iterator[str]:
    """Models and their kernels are made of vLLM's public layers; all else of vLLM is one room's."""
    if source.room == VLLM_ROOM:
        return
    is_of_model = source.room == "kernels" or (source.room == "models" and source.path.count("/") > 1)
    dotted = (text for text in strings(source) if re.fullmatch(r"vllm(\.\w+)+", text))
    for name in sorted({name for name in (*imported(source), *dotted) if name.split(".")[0] == "vllm"}):
        if not (is_of_model and PUBLIC_LAYERS.match(name)):
            yield f"imports {name}"


def tools_of_tests(source: Source) -> Iterator[str]:
    libraries = {name.split(".")[0] for name in imported(source)}
    yield from (f"imports {library}" for library in libraries & TEST_TOOLS)


def model_names(source: Source) -> Iterator[str]:
    if source.room == "models":
        return
    yield from (f"says {name!r}" for name in {*strings(source), *identifiers(source)} if MODEL_NAME.search(name))


def model_numbers(source: Source) -> Iterator[str]:
    """The family says them, whatever they are for."""
    if source.room == "models":
        return
    constants = [node.value for node in ast.walk(source.tree) if isinstance(node, ast.Constant)]
    numbers = {value for value in constants if type(value) in (int, float)}
    yield from (f"counts on {number}" for number in sorted(numbers & MODEL_NUMBERS))
    assigned = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and not is_read(node)}
    yield from (f"fixes {name}" for name in sorted(assigned) if MODEL_CONSTANTS.search(name))


def is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


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


# ------------------------------------------------------------ the rules kept

Rule = Callable[[Source], Iterator[str]]
RULES: Mapping[Rule, tuple[str, str]] = {  # each with the module and the code of a breach
    modules_named: ("config/a.py", "WORKER = 'omni_cluster.vllm_engine.worker.ar_worker.GPUARWorker'"),
    vllm_out_of_place: ("engine/a.py", "def f():\n    from vllm.platforms import current_platform"),
    tools_of_tests: ("vllm_engine/a.py", "from unittest.mock import patch"),
    model_names: ("engine/a.py", "if stage == 'talker': pass"),
    model_numbers: ("engine/a.py", "def f(codes): return 480 * codes"),
    long_functions: ("engine/a.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    swallowed_errors: ("engine/a.py", "def f():\n    try: g()\n    except (ValueError, Exception): pass"),
    environment_writes: ("engine/a.py", "import os\nos.environ.setdefault('SEED', '1')"),
}
BREACHES = [
    *[(rule, path, code) for rule, (path, code) in RULES.items()],
    (vllm_out_of_place, "cluster/a.py", "importlib.import_module('vllm.logger')"),
    (vllm_out_of_place, "models/a.py", "from vllm.config import VllmConfig"),
    (vllm_out_of_place, "models/family/a.py", "from vllm.v1.request import Request"),
    (vllm_out_of_place, "models/family/a.py", "import vllm.v1"),
    (model_names, "engine/a.py", "class ThinkerStage:\n    'A stage.'"),
    (model_numbers, "openai_api/a.py", "SAMPLE_RATE_HZ = 22_050"),
    (model_numbers, "engine/a.py", "END = 151_645"),
    (swallowed_errors, "engine/a.py", "try: g()\nexcept: pass"),
    (swallowed_errors, "engine/a.py", "with contextlib.suppress(Exception): g()"),
    (environment_writes, "engine/a.py", "os.environ['SEED'] = '1'"),
    (environment_writes, "engine/a.py", "del os.environ['SEED']"),
]


@functools.cache
def found(rule: Rule) -> set[str]:
    return {f"{source.path} {breach}" for source in package_sources() for breach in rule(source)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    assert sorted(found(rule) - set(ALLOWED)) == []


@pytest.mark.parametrize(("rule", "path", "code"), BREACHES)
def test_a_breach_is_found(rule: Rule, path: str, code: str) -> None:
    assert list(rule(Source(path, ast.parse(code))))


def test_what_is_allowed_is_still_there() -> None:
    assert sorted(set(ALLOWED) - set().union(*map(found, RULES))) == []


def test_no_file_but_kernels_is_long() -> None:
    package = ROOT / PACKAGE
    lines = {path.relative_to(package).as_posix(): path.read_text().count("\n") for path in package.rglob("*.py")}
    assert [name for name, number in lines.items() if number > MAX_FILE_LINES] == [KERNELS]


def test_docstrings_and_comments_may_name_a_model() -> None:
    code = '"""The thinker."""\nclass Stage:\n    """Like a talker."""\n    x = 1  # code2wav\n    """Qwen."""'
    assert not list(model_names(Source("engine/a.py", ast.parse(code))))


def test_an_error_that_is_raised_again_is_not_swallowed() -> None:
    code = "try: g()\nexcept Exception as error:\n    log.fail(error)\n    raise"
    assert not list(swallowed_errors(Source("engine/a.py", ast.parse(code))))


def test_a_model_may_be_made_of_the_layers_that_vllm_offers() -> None:
    code = "from vllm import ModelRegistry\nfrom vllm.model_executor.layers.layernorm import RMSNorm"
    assert not list(vllm_out_of_place(Source("models/family/a.py", ast.parse(code))))


def test_no_test_module_imports_another() -> None:
    """What several of them use is in a module beside them, so that each is run and moved by itself."""
    tests = ROOT / "tests"
    imports = re.compile(r"^\s*(?:from|import) (tests\.[\w.]*\btest_\w+)", re.MULTILINE)
    for path in tests.rglob("*.py"):
        itself = ".".join(path.relative_to(ROOT).with_suffix("").parts)  # a child process may import what started it
        assert set(imports.findall(path.read_text())) <= {itself}, path


def test_a_folder_of_tests_that_is_a_package_is_one_of_tests() -> None:
    """Else pytest imports `tests/served/toy` as `toy`, which is the name of the toy family's package."""
    families = ROOT / "tests" / "families"
    packages = {path.parent for path in (ROOT / "tests").rglob("__init__.py") if families not in path.parents}
    assert [path for path in packages if path.name != "tests" and path.parent not in packages] == []
