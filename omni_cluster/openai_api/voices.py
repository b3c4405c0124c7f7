"""The voices of a model, by the names that clients have for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from omni_cluster.openai_api.errors import invalid
from omni_cluster.openai_api.wire import NamedVoice, shown, voice_name


def chosen_voice(
    asked: Mapping[str, NamedVoice | None], voices: Collection[str], aliases: Mapping[str, str]
) -> str | None:
    """The voice of the model that a request asks for; None: the default one.

    `asked`: by the path of each field that may name one. Case does not count. BadRequest for a name that is neither a
    voice nor an alias, and for two fields that name two voices.
    """
    found = {
        param: _voice(name, voices, aliases, param) for param, named in asked.items() if (name := voice_name(named))
    }
    if len(set(found.values())) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"{first} and {second} differ; send one of them.")
    return next(iter(found.values()), None)


def _voice(name: str, voices: Collection[str], aliases: Mapping[str, str], param: str) -> str:
    if name in voices:
        return name
    folded = name.casefold()
    known = {alias.casefold(): voice for alias, voice in aliases.items()} | {each.casefold(): each for each in voices}
    if folded in known:
        return known[folded]
    raise invalid(param, f"{param} is {shown(name)}, but the voices are {', '.join(sorted(voices))}.")
