"""What a reply may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the reply may call, as OpenAI writes them: {"type": "function", "function": {"name", ...}}.

    `must_call`: the reply is calls and nothing else; of `name` alone, if that is given. `is_parallel`: False for one
    call at most.
    """

    tools: tuple[Mapping[str, Any], ...]
    must_call: bool = False
    name: str | None = None
    is_parallel: bool = True
