"""The input of `POST /v1/responses`: its items, and the messages of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

from omni_cluster.openai_api.fields import Others
from omni_cluster.openai_api.messages import MAX_PARTS
from omni_cluster.openai_api.parts import Part
from omni_cluster.openai_api.paths import Paths
from omni_cluster.openai_api.wire import SOME, Text, Wire, at_most, by_json_type, not_blank

ChatMessage = dict[str, Any]
"""As `/v1/chat/completions` takes it."""

_MARKS = frozenset({"id", "status"})
"""What an item of an earlier answer has beside what it says."""


class _InputFile(Wire):
    """What a chat has in an object of its own."""

    others = Others(
        ignored=frozenset({"filename", "detail", "prompt_cache_breakpoint"}),
        instead=dict.fromkeys(("file_id", "file_url"), "no file is kept or fetched here; send its data as file_data"),
    )

    type: Literal["input_file"]
    file_data: Text


def _tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"#{kind}" if isinstance(kind, str) else None


_AnyPart = Annotated[
    Annotated[_InputFile, Tag("#input_file")] | Annotated[Part, Tag("#part")],
    Discriminator(lambda part: "#input_file" if _tag(part) == "#input_file" else "#part"),
]
_Content = Annotated[
    Annotated[str, Tag("#string")]
    | Annotated[list[_AnyPart], AfterValidator(not_blank), SOME, at_most(MAX_PARTS), Tag("#list")],
    by_json_type("should be a string or a list of content parts"),
]


class _MessageItem(Wire):
    others = Others(ignored=_MARKS | {"phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class _CallItem(Wire):
    others = Others(ignored=_MARKS | {"parsed_arguments"}, idle={"caller": ({"type": "direct"},)})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutputItem(Wire):
    others = Others(ignored=_MARKS | {"name"}, idle={"caller": ({"type": "direct"},)})

    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class _ReasoningItem(Wire):
    """Of another model: ours could not read it."""

    others = Others(ignored=frozenset({"summary", "content", "encrypted_content", "status"}))

    type: Literal["reasoning"]
    id: str | None = None


def _not_kept(value: str) -> str:
    raise PydanticCustomError(
        "not_kept",
        "names an item of an earlier answer, and none is kept; send the item itself, as clients do with store: false",
    )


class _ItemReference(Wire):
    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, AfterValidator(_not_kept)]


def _item_tag(item: object) -> str | None:
    """Messages and references may come without a type."""
    if isinstance(item, dict) and item.get("type") is None:
        return "#item_reference" if "id" in item and "role" not in item else "#message"
    return _tag(item)


Item = Annotated[
    Annotated[_MessageItem, Tag("#message")]
    | Annotated[_CallItem, Tag("#function_call")]
    | Annotated[_CallOutputItem, Tag("#function_call_output")]
    | Annotated[_ReasoningItem, Tag("#reasoning")]
    | Annotated[_ItemReference, Tag("#item_reference")],
    Discriminator(
        _item_tag,
        custom_error_type="part_type",
        custom_error_message="should be 'message', 'function_call', 'function_call_output' or 'reasoning'",
    ),
]


class Conversation:
    """Messages as they are made of instructions and items; `paths` notes where each came from.

    `left_out`: ids of the items that the model is not shown.
    """

    def __init__(self, paths: Paths) -> None:
        self.messages: list[ChatMessage] = []
        self.left_out: list[str] = []
        self._paths = paths

    def say(self, role: str, text: str, path: str) -> None:
        """One message, all of which is the field `path`."""
        here = self._add({"role": role, "content": text}, path)
        self._paths.note(f"{here}.content", path)

    def read(self, items: Sequence[Item], path: str) -> None:
        for index, item in enumerate(items):
            self._read(item, f"{path}[{index}]")

    def _read(self, item: Item, path: str) -> None:
        if isinstance(item, _MessageItem):
            here = self._add({"role": item.role}, path)
            self._fill(here, item.content, f"{path}.content")
        elif isinstance(item, _CallItem):
            self._call(item, path)
        elif isinstance(item, _CallOutputItem):
            here = self._add({"role": "tool", "tool_call_id": item.call_id}, path)
            self._paths.note(f"{here}.tool_call_id", f"{path}.call_id")
            self._fill(here, item.output, f"{path}.output")
        elif isinstance(item, _ReasoningItem):
            self.left_out.append(item.id or "")

    def _add(self, message: ChatMessage, path: str) -> str:
        here = f"messages[{len(self.messages)}]"
        self._paths.note(here, path)
        self.messages.append(message)
        return here

    def _fill(self, here: str, content: _Content, path: str) -> None:
        """Gives the last message its content."""
        self._paths.note(f"{here}.content", path)
        if isinstance(content, str):
            self.messages[-1]["content"] = content
        else:
            self.messages[-1]["content"] = [
                self._part(part, f"{here}.content[{i}]", f"{path}[{i}]") for i, part in enumerate(content)
            ]

    def _part(self, part: _AnyPart, here: str, path: str) -> dict[str, Any]:
        if isinstance(part, _InputFile):
            self._paths.note(f"{here}.file", path)
            return {"type": "file", "file": {"file_data": part.file_data}}
        return part.model_dump(exclude_none=True)

    def _call(self, item: _CallItem, path: str) -> None:
        """A call belongs to what the assistant said just before it."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": None}, path)
        calls = self.messages[-1].setdefault("tool_calls", [])
        all_calls = f"messages[{len(self.messages) - 1}].tool_calls"
        here = f"{all_calls}[{len(calls)}]"
        self._paths.note(all_calls, path)
        self._paths.note(here, path)
        self._paths.note(f"{here}.id", f"{path}.call_id")
        self._paths.note(f"{here}.function", path)
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
