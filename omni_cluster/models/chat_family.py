"""What families have in common whose first stage chats: a template, a tokenizer, and tokens that stand for media."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omni_cluster.models.chat_files import ChatTemplate, FileTokenizer
from omni_cluster.models.family import Family
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.tool_messages import as_text
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import Prompt

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


class ChatFamily(Family):
    """A family with a chat template of marks, by the files of its checkpoint."""

    folder: Path
    """Of the checkpoint."""
    system: ClassVar[str] = ""
    """What the template says in place of a system message."""

    @property
    @abstractmethod
    def media_ids(self) -> tuple[int, ...]:
        """What a prompt has in place of each row of a sound, a picture or a video: that of sound first."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    def audio_tokens(self, prompt_token_ids: Sequence[int]) -> int:
        return prompt_token_ids.count(self.media_ids[0])

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        return self.prompts.render(self._templated, messages, tools)

    def _templated(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        is_plain = not tools and not any(each.get("tool_calls") or each["role"] == "tool" for each in messages)
        if is_plain or self._has_place_for_tools:
            return self._template.render(messages, tools)
        return self._template.render(as_text(messages, tools, self.system))

    @cached_property
    def _has_place_for_tools(self) -> bool:
        """Whether the checkpoint's template writes both tools and their calls."""
        plain, tooled = self._template.render(_ASKED), self._template.render(_ASKED, _TOOLS)
        return tooled not in (plain, self._template.render(_UNCALLED, _TOOLS))

    def reading(self, text: str) -> Prompt:
        return self.render([{"role": "user", "content": READ_ALOUD}])

    def completing(self, text: str | Sequence[int]) -> Prompt:
        if not text:
            raise RequestError("the prompt is empty; send the text to go on with.")
        if isinstance(text, str):
            self._check_no_media(next((mark for mark in self._media_marks if mark in text), None))
            return Prompt(text, tuple(self.prompts.marked_ids(text)))
        if (largest := max(text)) >= self.vocab_size:
            raise RequestError(f"the prompt has token {largest}, but the model's are 0 to {self.vocab_size - 1}.")
        self._check_no_media(next((mark for mark in self.media_ids if mark in text), None))
        return Prompt(self.prompts.text(text), tuple(text))

    @staticmethod
    def _check_no_media(mark: str | int | None) -> None:
        if mark is not None:
            raise RequestError(f"the prompt has {mark}, which stands for media, but it has none; leave it out.")

    @cached_property
    def _media_marks(self) -> list[str]:
        return [mark for mark in self.prompts.strings([*self.media_ids]) if mark]

    def tokenize(self, text: str, has_marks: bool) -> list[int]:
        return self.prompts.marked_ids(text) if has_marks else self.prompts.text_ids(text)

    @cached_property
    def prompts(self) -> PromptMaker:
        return PromptMaker(FileTokenizer(self.folder))

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.folder)
