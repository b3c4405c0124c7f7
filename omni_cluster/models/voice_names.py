"""Which voices of a checkpoint requests may name, and by which names of other services and models."""

from __future__ import annotations

from collections.abc import Sequence

from omni_cluster.types.errors import ConfigError

_HIGH_NAMES = (
    *("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer"),  # OpenAI's
    *("Cherry", "Serena", "Jennifer", "Katerina", "Sunny", "Jada", "Vivian", "Ono_anna", "Sohee", "f030"),
)
_LOW_NAMES = (
    *("ash", "ballad", "cedar", "echo", "onyx", "verse"),  # OpenAI's
    *("Aiden", "Dylan", "Eric", "Ryan", "Marcus", "Roy", "Peter", "Rocky", "Li", "Nofish", "Uncle_fu", "m02"),
)


def choose_names(voices: Sequence[str], allowed: Sequence[str] | None, default: str | None) -> tuple[str, ...]:
    """The voices that requests may name, the default one first; ConfigError for one that the checkpoint lacks."""
    names = list(allowed) if allowed is not None else list(voices)
    names = [default, *(n for n in names if n != default)] if default is not None else names
    missing = [n for n in names if n not in voices]
    if missing:
        raise ConfigError(f"voice {missing[0]!r} is not in the checkpoint; use voices among {', '.join(voices)}.")
    return tuple(names)


def aliases_of(voices: Sequence[str], high: str, low: str) -> dict[str, str]:
    """Voices by the names of OpenAI's and of Qwen's other models: of the `high` voice and of the `low` one, the default
    one where that is not among `voices`.
    """

    def voice(name: str) -> str:
        return name if name in voices else voices[0]

    of_high, of_low = dict.fromkeys(_HIGH_NAMES, voice(high)), dict.fromkeys(_LOW_NAMES, voice(low))
    return of_high | of_low | {"default": voices[0]}
