"""Keys and quotas of the HTTP API, and what it gives by default."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field, field_validator, model_validator

from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.problems import Problem, Strict, refuse
from omni_cluster.types.modalities import Modality

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")
"""As browsers send it, and only what is equal to that counts."""


class ApiConfig(Strict):
    """API keys, quotas of one key, and defaults of the HTTP API."""

    keys_file: str | None = Field(
        default=None,
        description="File of API keys, one a line, on every host of an ingress.",
        examples=["keys.txt"],
        json_schema_extra=PUBLIC,
    )
    keys_variable: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with API keys, separated by commas, on every host of an ingress.",
        examples=["OMNI_API_KEYS"],
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins of web pages that may call the API; `*`: all.",
        examples=[["https://app.example"]],
    )
    # None: as many as there are places for.
    requests_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Requests of one API key in a minute; not set: any number.",
        examples=[60.0],
        json_schema_extra=PUBLIC,
    )
    sound_seconds_per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Seconds of sound that are made for one API key in a minute; not set: any number.",
        examples=[600.0],
    )

    voice_aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Further names of voices that requests may use, beside the family's own aliases.",
        examples=[{"alloy": "Ethan"}],
    )
    default_modalities: list[Modality] = Field(
        default=["text"],
        min_length=1,
        description="What a chat that names no modalities gets; text always comes too.",
        examples=[["text", "audio"]],
    )

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        fix = "no page has that origin, use scheme and host in small letters alone, for example https://app.example"
        refuse([Problem("", origin, fix) for origin in origins if not _ORIGIN.fullmatch(origin)])
        return origins

    @model_validator(mode="after")
    def _rates_have_keys(self) -> ApiConfig:
        if self.keys_file is None and self.keys_variable is None:
            fix = "it counts for each API key, name some by keys_file or keys_variable"
            rates = ("requests_per_minute", "sound_seconds_per_minute")
            refuse([Problem(name, value, fix) for name in rates if (value := getattr(self, name)) is not None])
        return self
