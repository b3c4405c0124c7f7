"""From a YAML file to a `PipelineConfig`, or to one sentence that says what to change in the file."""

from __future__ import annotations

import logging
import os.path
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from omni_cluster.config.advanced import ADVANCED, MisplacedKey, Places, is_public, move_advanced
from omni_cluster.config.problems import MISSING, PROBLEM_TYPE, REMOVED, Strict, nearest
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.types.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has the folder inside the package, a checkout has it next to the package.
_CONFIG_FOLDERS = (_PACKAGE / "stage_configs", _PACKAGE.parent / "stage_configs")
STAGE_CONFIGS = next((folder for folder in _CONFIG_FOLDERS if folder.is_dir()), _CONFIG_FOLDERS[0])
DEFAULT_CONFIG = STAGE_CONFIGS / "qwen2_5_omni_toy.yaml"

Location = tuple[int | str, ...]
Options = TypeVar("Options", bound=BaseModel)

_PLAIN_KEY = re.compile(r"[\w-]{1,60}")
_UNKNOWN_KEY = ("extra_forbidden", "invalid_key")
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "literal_error": "{expected}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "text of at least {min_length} character",
}


def load_config(path: Path | str | None = None, *, known_families: Collection[str]) -> PipelineConfig:
    """Read and check the stage YAML at `path` (default: the toy's CPU deployment that is shipped with the package).

    Where the working folder has no such file, `stage_configs/NAME` is the shipped one.

    Raises:
        ConfigError: the file cannot be read, is not one YAML mapping, or breaks a rule of the schema; one sentence that
            names the file, the key, its value and a value that would do.
    """
    source = DEFAULT_CONFIG if path is None else _given_or_shipped(Path(path))
    return check_config(_read_mapping(source), str(source), known_families=known_families)


def check_config(given: Mapping[Any, Any], source: str, *, known_families: Collection[str]) -> PipelineConfig:
    """The configuration that `given` is, which came from `source`. Raises ConfigError, as `load_config`.

    Warns of keys that are advanced and not under `advanced`.
    """
    try:
        moved, places = move_advanced(given, PipelineConfig, StageConfig)
        config = PipelineConfig.model_validate(moved, context={"known_families": known_families})
    except MisplacedKey as error:
        raise ConfigError(f"{source}: {error.key} is {_show(error.value)}; {error.fix}.") from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {_sentence(error, PipelineConfig, places)}") from None
    _warn_of_old(places.old, source)
    return config


def check_options(options: type[Options], stage: StageConfig, where: str) -> Options:
    """What a stage says to a model of a family's own. Raises ConfigError, as `load_config`; `where`: the stage's path.

    Warns of keys that are advanced and not under `advanced`.
    """
    plain, advanced = f"{where}.options", f"{where}.{ADVANCED}.options"
    places = Places({f"{plain}.{key}": f"{advanced}.{key}" for key in stage.advanced_options})
    for key, value in stage.advanced_options.items():
        if key in options.model_fields and is_public(options.model_fields[key]):
            raise ConfigError(f"{advanced}.{key} is {_show(value)}; it is a public key, set {plain}.{key} instead.")
        if key in stage.options:
            raise ConfigError(f"{advanced}.{key} is {_show(value)}; {plain}.{key} is set too, keep one of the two.")
    try:
        checked = options.model_validate(stage.all_options)
    except ValidationError as error:
        raise ConfigError(_sentence(error, options, places, f"{plain}.")) from None
    old = [key for key in stage.options if not is_public(options.model_fields[key])]
    _warn_of_old({f"{plain}.{key}": f"{advanced}.{key}" for key in old}, "stages")
    return checked


def _warn_of_old(places: Mapping[str, str], source: str) -> None:
    if places:
        old, new = next(iter(places.items()))
        others = f" (and {len(places) - 1} like it: {', '.join([*places][1:])})" if len(places) > 1 else ""
        logger.warning("%s: %s%s is read, but its place is %s now.", source, old, others, new)


def _given_or_shipped(path: Path) -> Path:
    """So that the pages' commands run outside a checkout too."""
    shipped = STAGE_CONFIGS / path.name
    is_shipped = str(path.parent) == STAGE_CONFIGS.name and os.path.isfile(shipped)
    return shipped if is_shipped and not os.path.exists(path) else path


def _read_mapping(source: Path) -> dict[Any, Any]:
    given = _parse(source, _read_text(source))
    if given is None:
        raise ConfigError(f"{source}: the file is empty; {_good_file()}.")
    if not isinstance(given, dict):
        raise ConfigError(f"{source}: the file is {_show(given)}; it must be a mapping, {_good_file()}.")
    return given


def _read_text(source: Path) -> str:
    try:
        with source.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{source}: the file cannot be read ({error.strerror}); {_good_file()}.") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{source}: the file is above {MAX_CONFIG_BYTES} bytes; {_good_file()}.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: byte {error.start} is not UTF-8; {_good_file()}.") from None


def _good_file() -> str:
    return f"start from {DEFAULT_CONFIG}"


class _PlainLoader(yaml.SafeLoader):
    """YAML without surprises: no key twice, no tags, no dates, no text that UTF-8 cannot hold."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the base class declares it mutable)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise yaml.MarkedYAMLError(problem=f"the tag {tag} is not allowed", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        # While composing, because merge keys (<<) are still unmerged: overriding a merged key is not a repetition.
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        if isinstance(node, yaml.ScalarNode):
            # Half of a surrogate pair is legal YAML and no text: its UnicodeEncodeError comes best here, to the loader.
            node.value.encode("utf-8")
        return node


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    first_line: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in first_line:
            problem = f"the key {_key(key.value)} stands on line {first_line[key.value]} already, keep one of the two"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        first_line[key.value] = key.start_mark.line + 1


def _parse(source: Path, text: str) -> object:
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{source}: {_place(error.problem_mark)}{problem}; {_good_file()}.") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a number that YAML's pattern admits and Python's int() does not, or half of a surrogate pair.
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}; {_good_file()}.") from None
    except RecursionError:
        raise ConfigError(f"{source}: the file is nested too deep; {_good_file()}.") from None


def _place(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def _sentence(error: ValidationError, root: type[BaseModel], places: Places, where: str = "") -> str:
    """Of what `root`, which is at `where`, does not take."""
    errors = error.errors(include_url=False)
    # A misspelt key is also a missing one: the misspelling is what helps.
    first = min(errors, key=lambda error: error["type"] not in _UNKNOWN_KEY)
    further = len(errors) - 1 + sum(_context(error).get("further", 0) for error in errors)
    key, value, fix = _tell(first, root)
    return f"{places.in_file(where + key)} is {value}; {fix}{_and_further(further)}."


def _and_further(count: int) -> str:
    return f" (and {count} further problem{'s' if count > 1 else ''})" if count else ""


def _context(error: ErrorDetails) -> Mapping[str, Any]:
    return error.get("ctx", {})


def _tell(error: ErrorDetails, root: type[BaseModel]) -> tuple[str, str, str]:
    """Key, value and remedy of one error, by its type."""
    location, context = error["loc"], _context(error)
    if error["type"] == PROBLEM_TYPE:
        return _join(_dotted(location), context["key"]), _show(context["value"]), context["fix"]
    if error["type"] in _UNKNOWN_KEY:
        return _dotted(location), _show(error["input"]), _instead_of(location, root)
    if error["type"] == "missing":
        return _dotted(location), _show(MISSING), f"add it, for example {location[-1]}: {_example(location, root)}"
    return _dotted(location), _show(error["input"]), f"{_expectation(error)}, for example {_example(location, root)}"


def _instead_of(location: Location, root: type[BaseModel]) -> str:
    """What to do with a key that is not known."""
    if removed := REMOVED.get(".".join(step for step in location if isinstance(step, str))):
        return removed
    if issubclass(root, Strict) and (gone := root.gone.get(str(location[-1]))):
        return gone
    known = list(_parent_model(location, root).model_fields)
    return f"no such key is known, {nearest(str(location[-1]), known) if known else 'leave it out'}"


def _expectation(error: ErrorDetails) -> str:
    if error["type"] in _EXPECTED:
        return "it must be " + _EXPECTED[error["type"]].format(**_context(error))
    return error["msg"][:1].lower() + error["msg"][1:]


def _dotted(location: Location) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in location if step != "[key]")
    return "".join(steps).lstrip(".")


def _key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) else _show(name)


def _join(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer and inner else outer or inner


def _parent_model(location: Location, root: type[BaseModel]) -> type[BaseModel]:
    model = root
    for field in _fields(location[:-1], root):
        model = _model_in(field.annotation) or model
    return model


def _fields(location: Location, root: type[BaseModel]) -> Iterator[FieldInfo]:
    """The schema's fields along a path, outermost first, as far as the schema goes."""
    model: type[BaseModel] | None = root
    for step in location:
        if isinstance(step, int):
            continue
        if model is None or step not in model.model_fields:
            return
        field = model.model_fields[step]
        yield field
        model = _model_in(field.annotation)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def _example(location: Location, root: type[BaseModel]) -> str:
    """A value that would do at `location`, from the examples of the schema."""
    *_, innermost = _fields(location, root)
    example = (innermost.examples or [None])[0]
    if isinstance(example, list) and isinstance(location[-1], int):
        example = example[0]
    return example if isinstance(example, str) else _show(example)


class _Show(reprlib.Repr):
    """Values as YAML writes them, cut to a readable length (an alias may stand for more than memory holds)."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring, self.maxother = 3, 8, 8, 60, 60

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


def _show(value: object) -> str:
    return _Show().repr(value)
