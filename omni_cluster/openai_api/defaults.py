"""What a request that says nothing gets, as the configuration has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ApiDefaults:
    """`voice_aliases`: voices of the model by the names that other services' clients send.

    `modalities`: of a chat that names none, and no voice. `sample_rate_hz`: of the model's sound.
    """

    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    modalities: tuple[str, ...] = ("text",)
    sample_rate_hz: int = 0


NO_DEFAULTS = ApiDefaults()
