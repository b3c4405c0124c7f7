"""Qwen2.5-Omni: thinker, talker, code2wav."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omni_cluster.models.chat_files import ChatTemplate, FileTokenizer
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import Family, Hearing
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.qwen2_5_omni.code2wav import CodeBlocks
from omni_cluster.models.qwen2_5_omni.hearing import messages_of
from omni_cluster.models.qwen2_5_omni.special_ids import MediaIds, SpecialIds
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav, Talker, Thinker
from omni_cluster.models.qwen2_5_omni.video_frames import FRAMES
from omni_cluster.models.qwen2_5_omni.voices import (
    Voice,
    aliases_of,
    choose_names,
    load_voices,
    voice_names,
)
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.models.tool_messages import as_text
from omni_cluster.types.errors import ConfigError, RequestError
from omni_cluster.types.inputs import Prompt

if TYPE_CHECKING:  # the ingress, which renders prompts and knows voices by name, starts without torch
    from omni_cluster.models.qwen2_5_omni.talker import TextEmbeddings

SYSTEM = "You are a helpful assistant."
"""What the checkpoints' template says in place of a system message."""
READ_ALOUD = "Read this aloud."
"""What a text that is only to be spoken is the reply to."""
_FUNCTION = {"name": "f", "arguments": {"a": 1}}
_HELLO = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
_CALLING = {"role": "assistant", "content": [], "tool_calls": [{"id": "1", "type": "function", "function": _FUNCTION}]}
_RESULT = {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "1"}
_TOOLS = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},)
_ASKED = (_HELLO, _CALLING, _RESULT)
_UNCALLED = (_HELLO, {**_CALLING, "tool_calls": []}, _RESULT)
"""A conversation with a call, and without it: what a template writes of them."""


class Qwen2_5Omni(Family):
    """One checkpoint of the family, 7B, 3B or a toy: they differ in sizes only."""

    name = "qwen2_5_omni"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Thinker, Talker, Code2Wav)
    presets = ("tiny",)
    frames = FRAMES

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        self.folder = model
        self._config = config = read_config(model)
        if "talker_config" not in config:
            raise ConfigError(f"model {model} has no talker_config; use a Qwen2.5-Omni checkpoint.")
        self.ids = SpecialIds.from_config(config)
        self._media_ids = MediaIds.from_config(config)
        self._voice_names = choose_names(voice_names(model), voices, default_voice)

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint

        return embedded_checkpoint(preset)

    @classmethod
    def make_checkpoint(
        cls, preset: str, out: Path, *, device: str | None = None, progress: Callable[[str], None] = print
    ) -> object:
        from omni_cluster.models.qwen2_5_omni.checkpoint import make_checkpoint

        return make_checkpoint(preset, out, device=device, progress=progress)

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voice_names

    @property
    def voice_aliases(self) -> Mapping[str, str]:
        return aliases_of(self._voice_names)

    def audio_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        return prompt_token_ids.count(self._media_ids.audio)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        return self.prompts.render(self._templated, messages, tools)

    def _templated(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        is_plain = not tools and not any(each.get("tool_calls") or each["role"] == "tool" for each in messages)
        if is_plain or self._has_place_for_tools:
            return self._template.render(messages, tools)
        return self._template.render(as_text(messages, tools, SYSTEM))

    @cached_property
    def _has_place_for_tools(self) -> bool:
        """Whether the checkpoint's template writes both tools and their calls."""
        plain, tooled = self._template.render(_ASKED), self._template.render(_ASKED, _TOOLS)
        return tooled not in (plain, self._template.render(_UNCALLED, _TOOLS))

    def reading(self, text: str) -> Prompt:
        return self.render([{"role": "user", "content": READ_ALOUD}])

    def hearing(self, hearing: Hearing) -> Prompt:
        return self.render(messages_of(hearing))

    def completing(self, text: str | Sequence[int]) -> Prompt:
        if not text:
            raise RequestError("the prompt is empty; send the text to go on with.")
        if isinstance(text, str):
            self._check_no_media(next((mark for mark in self._media_marks if mark in text), None))
            return Prompt(text, tuple(self.prompts.marked_ids(text)))
        if (largest := max(text)) >= self.vocab_size:
            raise RequestError(f"the prompt has token {largest}, but the model's are 0 to {self.vocab_size - 1}.")
        self._check_no_media(next((mark for mark in self._media_ids if mark in text), None))
        return Prompt(self.prompts.text(text), tuple(text))

    @staticmethod
    def _check_no_media(mark: str | int | None) -> None:
        if mark is not None:
            raise RequestError(f"the prompt has {mark}, which stands for media, but it has none; leave it out.")

    @cached_property
    def _media_marks(self) -> list[str]:
        return [mark for mark in self.prompts.strings([*self._media_ids]) if mark]

    @property
    def vocab_size(self) -> int:
        return int(self._config["thinker_config"]["text_config"]["vocab_size"])

    @property
    def codec_vocab_size(self) -> int:
        """Codes and marks of the talker."""
        return int(self._config["talker_config"]["vocab_size"])

    def tokenize(self, text: str, has_marks: bool) -> list[int]:
        return self.prompts.marked_ids(text) if has_marks else self.prompts.text_ids(text)

    @cached_property
    def prompts(self) -> PromptMaker:
        return PromptMaker(FileTokenizer(self.folder))

    @cached_property
    def text_embeddings(self) -> TextEmbeddings:
        from omni_cluster.models.qwen2_5_omni.talker import TextEmbeddings

        return TextEmbeddings.load(self.folder, self.ids, self.loaded_voices)

    @cached_property
    def blocks(self) -> CodeBlocks:
        return CodeBlocks.from_config(self._config)

    @cached_property
    def loaded_voices(self) -> dict[str, Voice]:
        loaded = load_voices(self.folder)
        return {name: loaded[name] for name in self._voice_names}

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.folder)
