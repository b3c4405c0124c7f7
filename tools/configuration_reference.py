"""The reference of the stage configuration, as its schema gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.advanced import ADVANCED, ADVANCED_OPTIONS, is_public
from omni_cluster.config.autoscaling import AutoscalingConfig, SignalsConfig
from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.limits import Limits
from omni_cluster.config.media import DecodersConfig, FetchConfig
from omni_cluster.config.placement import PlacementConfig
from omni_cluster.config.schema import RESERVED_ENGINE_ARGS, PipelineConfig, StageConfig
from omni_cluster.models.family import Family
from omni_cluster.models.registry import family_class, known_families
from tools.tables import code, listed, table

_COLUMNS = ("key", "type", "default", "bounds", "meaning")
LINKS: Final[Mapping[str, str]] = {
    "PipelineConfig.cache_dir": "operations.md#starts",
    "PipelineConfig.ray_metrics": "monitoring.md",
    "StageConfig.placement": "clusters.md#which-stage-runs-where",
    "StageConfig.hosts_per_replica": "clusters.md#a-model-on-several-hosts",
    "StageConfig.card_priority": "#stages-that-share-a-card",
    "StageConfig.memory_gib": "memory.md",
    "StageConfig.stall_timeout_s": "operations.md#replicas-that-hang",
    "StageConfig.standby_replicas": "operations.md#replicas-that-stand-by",
    "AutoscalingConfig.min_replicas": "operations.md#stages-that-sleep",
    "AutoscalingConfig.signals": "operations.md#replicas-that-follow-the-load",
    "StageConfig.engine_args": "#refused-engine_args",
    "StageConfig.advanced_options": "#options-of-code2wav-qwen2_5_omni",
    "Limits.closing_grace_s": "operations.md#ends",
    "Limits.max_restarts": "reliability.md",
    "Limits.upload_timeout_s": "operations.md#slow-clients",
    "Limits.kept_media_bytes": "memory.md#what-is-kept-of-earlier-requests",
    "ApiConfig.keys_file": "operations.md#add-an-api-key",
    "ApiConfig.requests_per_minute": "operations.md#limit-what-one-client-may-use",
    "FetchConfig.allow_private": "security.md",
}
"""Where more is said of a key, by its model in the schema."""
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "pattern": "`{}`",
    "minLength": "not empty",
    "minItems": "not empty",
}
"""By JSON schema's names."""
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """One model of the schema: its heading on the page, and the keys of the file whose value it is."""

    title: str
    keys: Sequence[str]
    model: type[BaseModel]

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(",", "").replace(" ", "-")


def configuration_reference() -> str:
    return "\n".join([_public_keys(), *map(_section, sections()), _refused_engine_args()])


def public_keys() -> list[str]:
    """Paths of the keys that do not stand under `advanced`."""
    return [path for path, *_ in _public_rows()]


def undescribed() -> list[str]:
    """Keys that the schema gives no meaning."""
    fields = ((section, *item) for section in sections() for item in section.model.model_fields.items())
    return [f"{section.title}: {key}" for section, key, field in fields if not (field.description or "").endswith(".")]


def sections() -> list[Section]:
    """In the order of the page."""
    return [
        Section("Top level", ("",), PipelineConfig),
        Section("stages", ("stages[]",), StageConfig),
        Section("placement", ("stages[].placement", "ingress_placement"), PlacementConfig),
        Section("autoscaling", ("stages[].autoscaling",), AutoscalingConfig),
        Section("signals", ("stages[].autoscaling.signals",), SignalsConfig),
        *_options(),
        Section("limits", ("limits",), Limits),
        Section("api", ("api",), ApiConfig),
        Section("fetch", ("fetch",), FetchConfig),
        Section("decoders", ("decoders",), DecodersConfig),
        Section("handover", ("handover",), HandoverConfig),
    ]


def _families() -> Iterator[type[Family]]:
    """Those of this package: another one may have registered its own here."""
    classes = map(family_class, known_families())
    return (each for each in classes if each.__module__.startswith("omni_cluster."))


def _options() -> Iterator[Section]:
    for family in _families():
        for name, spec in family.stages.items():
            if spec.Options.model_fields:
                yield Section(f"options of {name}, {family.name}", ("stages[].options",), spec.Options)


def _public_keys() -> str:
    rows = [(code(path), *cells) for path, *cells in _public_rows()]
    return f"## Public keys\n\n{table(_COLUMNS, rows)}\n"


def _public_rows() -> Iterator[tuple[str, ...]]:
    for section in sections():
        properties = section.model.model_json_schema()["properties"]
        for key, field in section.model.model_fields.items():
            if is_public(field):
                yield _join(section.keys[0], key), *_cells(section.model, key, properties[key])


def _section(section: Section) -> str:
    properties = section.model.model_json_schema()["properties"]
    rows = [
        (code("options" if key == ADVANCED_OPTIONS else key), *_cells(section.model, key, properties[key]))
        for key, field in section.model.model_fields.items()
        if not is_public(field)
    ]
    return f"## {section.title}\n\n{_intro(section)}\n\n{table(_COLUMNS, rows)}\n"


def _join(outer: str, key: str) -> str:
    return f"{outer}.{key}" if outer else key


def _advanced(path: str) -> str:
    """Where keys stand that are no public ones of the mapping at `path`."""
    stage, _, inner = path.rpartition("[].")
    return f"{path}.{ADVANCED}" if path.endswith("[]") else f"{stage}[].{ADVANCED}.{inner}" if stage else _at_top(path)


def _at_top(path: str) -> str:
    return f"{ADVANCED}.{path}" if path else ADVANCED


def _intro(section: Section) -> str:
    said = [f"Keys of {' and '.join(code(_advanced(path)) for path in section.keys)}."]
    said.append(" ".join((section.model.__doc__ or "").split()))
    if section.model is StageConfig:
        said.extend(f"{code(family.name)} has the stages {listed(family.stages)}." for family in _families())
    return " ".join(said)


def _cells(model: type[BaseModel], key: str, schema: Schema) -> tuple[str, ...]:
    """What a row says of a key. `schema`: the key's JSON schema."""
    field = model.model_fields[key]
    link = LINKS.get(f"{model.__name__}.{key}")
    meaning = (field.description or "") + (f" [More]({link})" if link else "")
    value = next((each for each in schema.get("anyOf", ()) if each.get("type") != "null"), schema)
    return _type(value), _default(key, field), _bounds(value), meaning


def _type(schema: Schema, plural: str = "") -> str:
    """Raises KeyError for a model that has no section."""
    if "$ref" in schema:
        anchors = {section.model.__name__: section.anchor for section in sections()}
        return f"[mapping{plural}](#{anchors[schema['$ref'].rpartition('/')[2]]})"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'], 's')}"
    return schema["type"].replace("object", "mapping") + plural


def _default(key: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, BaseModel):
        return ""
    size = f" ({_binary_size(value)})" if key.endswith("_bytes") else ""
    return code(_as_yaml(value)) + size


def _as_yaml(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _binary_size(size_bytes: int) -> str:
    unit_bytes, unit = next((each for each in _SIZES if size_bytes >= each[0]), (1, "bytes"))
    return f"{size_bytes / unit_bytes:g} {unit}"


def _bounds(schema: Schema) -> str:
    """What a value must be; of a list, what its entries must be too."""
    names = listed(schema.get("enum", ()))
    said = [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]
    return ", ".join(filter(None, (names, *said, _bounds(schema["items"]) if "items" in schema else "")))


def _refused_engine_args() -> str:
    rows = [(code(name), fix) for name, fix in RESERVED_ENGINE_ARGS.items()]
    return f"## Refused engine_args\n\n{table(('argument', 'what to do'), rows)}\n"
