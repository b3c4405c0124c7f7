"""LoRA adapters of a stage, in PEFT's format: what their folders say, checked before an engine reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from omni_cluster.config.lora import LORA_RANKS
from omni_cluster.config.schema import StageConfig
from omni_cluster.memory.sizes import header_of, stated_bytes, tensor_shapes
from omni_cluster.types.errors import AdapterError

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_PARTS: Final = {".lora_A.weight": "A", ".lora_B.weight": "B"}


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One of a stage's. `key`: its place in the configuration.

    `changes`: of each module of the checkpoint that it changes, how many values go in and come out.
    """

    name: str
    key: str
    folder: Path
    rank: int
    changes: Mapping[str, tuple[int, int]]

    @property
    def projections(self) -> set[str]:
        """Last names of the modules, as `q_proj`."""
        return {_projection(module) for module in self.changes}


def read_adapters(stage: StageConfig, prefixes: Mapping[str, str]) -> list[LoraAdapter]:
    """Those of a stage. `prefixes`: what the family says an adapter may change (`StageSpec.lora_prefixes`).

    Raises AdapterError for what the stage cannot take.
    """
    if stage.lora_adapters and not prefixes:
        key = f"{_place(stage)}.{next(iter(stage.lora_adapters))}"
        raise AdapterError(f"{key} is set, but the model of this stage takes no LoRA adapters; remove it.")
    adapters = [_Reading(f"{_place(stage)}.{name}", name, folder, prefixes).read() for name, folder in _named(stage)]
    for adapter in adapters:
        _check_rank(adapter, stage.engine_args.get("max_lora_rank"))
    return adapters


def check_fit(adapters: Iterable[LoraAdapter], checkpoint: Path) -> None:
    """Raises AdapterError for an adapter of another model: it changes what the checkpoint has not, or not so wide.

    Weights that are packed, as by AWQ, do not say how wide they are.
    """
    shapes: Mapping[str, list[int]] | None = None
    for adapter in adapters:
        shapes = shapes or tensor_shapes(checkpoint)
        modules = _modules(shapes)
        for module, (width_in, width_out) in adapter.changes.items():
            has = shapes.get(f"{module}.weight", [width_out, width_in] if module in modules else [])
            if has != [width_out, width_in]:
                raise AdapterError(
                    f"{adapter.key} is {str(adapter.folder)!r}, whose {module} is {[width_out, width_in]}, but the "
                    f"checkpoint's is {has or 'not there'}; name an adapter of this model."
                )


def most_rank(stage: StageConfig, adapters: Sequence[LoraAdapter]) -> int:
    """What the engine has space for: as configured, or the least of vLLM's steps that holds all adapters."""
    most = max(adapter.rank for adapter in adapters)
    return int(stage.engine_args.get("max_lora_rank") or next(rank for rank in LORA_RANKS if rank >= most))


def at_once(stage: StageConfig, adapters: Sequence[LoraAdapter]) -> int:
    """How many adapters a step may have: all, if the configuration says nothing."""
    return int(stage.engine_args.get("max_loras") or len(adapters))


def adapter_elements(stage: StageConfig, prefixes: Mapping[str, str], checkpoint: Path) -> int:
    """Values that vLLM keeps space for on each card: of all layers' modules of a name, where one adapter has one."""
    if not stage.lora_adapters:
        return 0
    adapters, widths = read_adapters(stage, prefixes), dict[str, int]()
    for adapter in adapters:
        for module, sizes in adapter.changes.items():
            name = _projection(module)
            widths[name] = max(widths.get(name, 0), sum(sizes))
    inside = [_pattern(prefix) for prefix in prefixes.values()]
    modules = [each for each in _modules(tensor_shapes(checkpoint)) if any(part.match(each) for part in inside)]
    width = sum(widths.get(_projection(module), 0) for module in modules)
    return width * most_rank(stage, adapters) * at_once(stage, adapters)


def described(adapters: Iterable[LoraAdapter]) -> list[str]:
    """A line of each, for a terminal."""
    return [f"LoRA adapter {each.name}: rank {each.rank}, {each.folder}" for each in adapters]


def _modules(tensors: Iterable[str]) -> set[str]:
    """What has the tensors of a checkpoint."""
    return {name.rpartition(".")[0] for name in tensors}


def _pattern(prefix: str) -> re.Pattern[str]:
    """Of the names that begin so; `*` is the number of a layer."""
    return re.compile(re.escape(prefix).replace(r"\*", r"(\d+)"))


def _projection(module: str) -> str:
    return module.rpartition(".")[2]


def _place(stage: StageConfig) -> str:
    return f"stage {stage.stage_id} ({stage.model_stage}): advanced.lora_adapters"


def _named(stage: StageConfig) -> list[tuple[str, Path]]:
    return [(name, Path(folder).expanduser()) for name, folder in stage.lora_adapters.items()]


def _check_rank(adapter: LoraAdapter, configured: int | None) -> None:
    most = configured or LORA_RANKS[-1]
    if adapter.rank > most:
        limit = "engine_args.max_lora_rank is" if configured else "the largest that vLLM takes is"
        fix = "set that higher" if configured else "name one of a lower rank"
        raise AdapterError(
            f"{adapter.key} is {str(adapter.folder)!r}, whose rank is {adapter.rank}, and {limit} {most}; {fix}."
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Of one adapter's folder."""

    key: str
    name: str
    folder: Path
    prefixes: Mapping[str, str]

    def read(self) -> LoraAdapter:
        config = self._config()
        ranks = self._ranks(config)
        halves = self._halves()
        changes = {}
        for module, shapes in halves.items():
            if set(shapes) != {"A", "B"}:
                self._refuse(f"whose {module} lacks lora_{'B' if 'A' in shapes else 'A'}", "name a whole adapter")
            (rank, width_in), (width_out, rank_out) = shapes["A"], shapes["B"]
            if rank != rank_out or rank not in ranks:
                told = ", ".join(map(str, sorted(ranks)))
                self._refuse(f"whose {module} has rank {rank}, but its {CONFIG_NAME} says {told}", "name a whole one")
            changes[module] = (width_in, width_out)
        return LoraAdapter(self.name, self.key, self.folder, max(ranks), changes)

    def _config(self) -> dict[str, Any]:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (self.folder / name).is_file():
                self._refuse(f"which has no {name}", "name a folder in PEFT's format")
        try:
            config = json.loads((self.folder / CONFIG_NAME).read_bytes())
        except ValueError:
            self._refuse(f"whose {CONFIG_NAME} is no JSON", "write it again")
        if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
            self._refuse(f"whose {CONFIG_NAME} is of no LoRA adapter", "name one with peft_type LORA")
        return config

    def _ranks(self, config: Mapping[str, Any]) -> set[int]:
        pattern = config.get("rank_pattern") or {}
        ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
        for rank in ranks:
            if type(rank) is not int or rank < 1:
                self._refuse(f"whose {CONFIG_NAME} has the rank {rank!r}", "it should be a whole number above 0")
        return set(ranks)

    def _halves(self) -> dict[str, dict[str, tuple[int, int]]]:
        """By module of the checkpoint, shapes of A `[rank, in]` and B `[out, rank]`."""
        try:
            header = header_of(self.folder / WEIGHTS_NAME)
            shapes = {name: tuple(each["shape"]) for name, each in header.items() if name != "__metadata__"}
            stated = stated_bytes(self.folder / WEIGHTS_NAME)
        except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
            self._refuse(f"whose {WEIGHTS_NAME} is no safetensors file", "write it again")
        if (self.folder / WEIGHTS_NAME).stat().st_size < stated:
            self._refuse(f"whose {WEIGHTS_NAME} is cut off", "copy it again")
        if not shapes:
            self._refuse(f"whose {WEIGHTS_NAME} has no weights", "name a trained adapter")
        halves: dict[str, dict[str, tuple[int, int]]] = {}
        for name, shape in shapes.items():
            module, half = self._module(name)
            if len(shape) != 2:
                self._refuse(f"whose {name} is {list(shape)}", "it should have two dimensions")
            halves.setdefault(module, {})[half] = shape
        return halves

    def _module(self, name: str) -> tuple[str, str]:
        """The checkpoint's name of what a tensor changes, and which half it is."""
        ending = next((ending for ending in _PARTS if name.endswith(ending)), None)
        inner = name.removeprefix(_PREFIX)
        begun = self._begun(inner)
        if ending is None or begun is None or inner == name:
            begins = " or ".join(_PREFIX + prefix for prefix in self.prefixes)
            self._refuse(f"which changes {name}", f"an adapter may change only linear layers below {begins}")
        return begun.removesuffix(ending), _PARTS[ending]

    def _begun(self, inner: str) -> str | None:
        """The name as it begins in the checkpoint; None for what adapters may not change."""
        for prefix, of_checkpoint in self.prefixes.items():
            if match := _pattern(prefix).match(inner):
                layer = match[1] if match.lastindex else ""
                return of_checkpoint.replace("*", layer) + inner[match.end() :]
        return None

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise AdapterError(f"{self.key} is {str(self.folder)!r}, {what}; {fix}.")
