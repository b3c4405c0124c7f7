"""What the toy says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import Family
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.types.errors import ConfigError, RequestError
from omni_cluster.types.inputs import Prompt
from toy.stages import CodesSpec, Sound, Text
from toy.tokenizer import VOCAB_SIZE, ByteTokenizer


class Toy(Family):
    """It says what it was told, in one of two voices."""

    name = "toy"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Text, CodesSpec, Sound)
    presets = ("tiny",)

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        offered = voices or read_config(model)["voices"]
        if default_voice is not None and default_voice not in offered:
            raise ConfigError(f"default_voice is {default_voice!r}; use one of {', '.join(offered)}.")
        self._voices = tuple(sorted(offered, key=lambda voice: voice != default_voice))

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        return Path(__file__).parent / "checkpoint"

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voices

    @cached_property
    def prompts(self) -> PromptMaker:
        return PromptMaker(ByteTokenizer())

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        return self.prompts.render(_templated, messages, tools)

    def reading(self, text: str) -> Prompt:
        return Prompt("")

    def completing(self, text: str | Sequence[int]) -> Prompt:
        if not text:
            raise RequestError("the prompt is empty; send the text to go on with.")
        ids = text.encode() if isinstance(text, str) else text
        return Prompt(text if isinstance(text, str) else self.prompts.text(text), tuple(ids))


def _templated(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """A line a message, and nothing of tools."""
    return "\n".join(_said(message["content"]) for message in messages)


def _said(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")
