"""The items of a conversation, as clients send and read them, and as messages of a chat."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Discriminator, Field, Tag

from omni_cluster.openai_api.errors import BadRequest, invalid
from omni_cluster.openai_api.messages import TemplateMessage
from omni_cluster.openai_api.realtime.client_events import Id
from omni_cluster.openai_api.realtime.parts import Part
from omni_cluster.openai_api.realtime.session import Format, checked
from omni_cluster.openai_api.realtime.sound import samples_of
from omni_cluster.openai_api.tools import template_arguments
from omni_cluster.openai_api.wire import shown

MOST_PARTS: Final = 256
PART_BYTES: Final = 512
"""That each part of a message counts beside its media and its text: what the objects of one take in memory."""
TEXTS: Final = ("text", "transcript", "name", "arguments", "output")
MOST_TEXT_CHARS: Final = 1 << 20
Text = Annotated[str, Field(max_length=MOST_TEXT_CHARS)]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:21]}"


class TextPart(Part):
    """`text`: the name that clients of the protocol's beta have for both."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class SoundPart(Part):
    """`audio`: base64 in the session's input format; of an earlier answer the transcript alone is read."""

    type: Literal["input_audio", "output_audio", "audio"]
    audio: str | None = None
    transcript: Text | None = None


class ImagePart(Part):
    """`image_url`: a data URL."""

    type: Literal["input_image"]
    image_url: str


_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("input_text", "output_text", "text"), "#text"),
    **dict.fromkeys(("input_audio", "output_audio", "audio"), "#sound"),
    "input_image": "#image",
}


def _kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


Content = Annotated[
    Annotated[TextPart, Tag("#text")] | Annotated[SoundPart, Tag("#sound")] | Annotated[ImagePart, Tag("#image")],
    Discriminator(
        _kind,
        custom_error_type="of_another_type",
        custom_error_message="should have the type input_text, input_audio, input_image, output_text or output_audio",
    ),
]


class _Item(Part):
    id: Id | None = None


class MessageItem(_Item):
    """What one side of the conversation says."""

    type: Literal["message"]
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Content], Field(max_length=MOST_PARTS)]


class CallItem(_Item):
    """A call of a tool in an earlier answer; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: Id
    name: str
    arguments: Text


class CallOutputItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Id
    output: Text


SENT: Final[Mapping[str, type[_Item]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}


@dataclass
class Item:
    """One of a conversation.

    `wire`: as clients read it, without sound and pictures. `message`: as a chat has it. `audios`: float32 `[samples]`,
    mono, at 16 kHz, and `images`: uint8 `[H, W, 3]`, of the message's parts in their order.
    """

    wire: dict[str, Any]
    message: TemplateMessage
    audios: list[npt.NDArray[np.float32]] = field(default_factory=list)
    images: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.wire["id"])

    @property
    def is_of_the_user(self) -> bool:
        return self.message["role"] == "user"

    def __post_init__(self) -> None:
        self._text_bytes = _text_bytes(self.wire)

    def write(self, **fields: Any) -> None:
        """Changes what clients read of it."""
        self.wire.update(fields)
        self._text_bytes = _text_bytes(self.wire)

    @property
    def num_bytes(self) -> int:
        """What its sound, its pictures and its text take in memory."""
        media: tuple[npt.NDArray[Any], ...] = (*self.audios, *self.images)
        return sum(each.nbytes for each in media) + self._text_bytes

    @property
    def template_message(self) -> TemplateMessage:
        """As a chat template reads it. Arguments that are kept as objects would take many times their text's memory."""
        if "tool_calls" not in self.message:
            return self.message
        return {**self.message, "tool_calls": [_template_call(each) for each in self.message["tool_calls"]]}


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": template_arguments(function["arguments"])}}


def _text_bytes(wire: Mapping[str, Any]) -> int:
    parts = wire.get("content", ())
    texts = [part.get(name) for part in (wire, *parts) for name in TEXTS]
    return PART_BYTES * len(parts) + sum(sys.getsizeof(each) for each in texts if each)


def sent_item(item: Mapping[str, Any], sound: Format, max_audio_s: float) -> tuple[Item, dict[str, str]]:
    """A client's item, with its sound, and the data URLs of its pictures by their paths, which are yet to be decoded.

    Raises BadRequest. `sound`: the session's input format.
    """
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in SENT:
        raise invalid("item.type", f"item.type is {shown(kind)}, but the items are {', '.join(SENT)}.")
    read = checked(SENT[kind], item)
    if isinstance(read, MessageItem):
        return _message(read, sound, max_audio_s)
    wire = _wire(kind, read.id, read.model_dump(exclude={"id", "type"}))
    if isinstance(read, CallItem):
        function = {"name": read.name, "arguments": read.arguments}
        call = {"id": read.call_id, "type": "function", "function": function}
        return Item(wire, {"role": "assistant", "content": [], "tool_calls": [call]}), {}
    content = [{"type": "text", "text": read.output}]
    return Item(wire, {"role": "tool", "content": content, "tool_call_id": read.call_id}), {}


def _message(read: MessageItem, sound: Format, max_audio_s: float) -> tuple[Item, dict[str, str]]:
    template: list[dict[str, str]] = []
    shown_parts: list[dict[str, Any]] = []
    item = Item({}, {"role": read.role, "content": template})
    urls = {}
    for i, part in enumerate(read.content):
        param = f"item.content[{i}]"
        _check_role(read.role, part, param)
        if isinstance(part, TextPart):
            template.append({"type": "text", "text": part.text})
            shown_parts.append({"type": _text_type(read.role), "text": part.text})
        elif isinstance(part, ImagePart):
            template.append({"type": "image"})
            shown_parts.append({"type": "input_image", "image_url": None})
            urls[f"{param}.image_url"] = part.image_url
        elif read.role == "assistant":
            template.append({"type": "text", "text": part.transcript or ""})
            shown_parts.append({"type": "output_audio", "transcript": part.transcript or ""})
        else:
            template.append({"type": "audio"})
            shown_parts.append({"type": "input_audio", "transcript": part.transcript})
            item.audios.append(samples_of(part.audio or "", sound, f"{param}.audio", max_audio_s))
    item.write(**_wire("message", read.id, {"role": read.role, "content": shown_parts}))
    return item, urls


def _check_role(role: str, part: TextPart | SoundPart | ImagePart, param: str) -> None:
    if role != "user" and (isinstance(part, ImagePart) or part.type == "input_audio"):
        raise invalid(param, f"{param} is {part.type} in a message of the {role}, but only the user's may have it.")
    if role == "system" and isinstance(part, SoundPart):
        raise invalid(param, f"{param} is {part.type}, but a message of the system is text.")


def _text_type(role: str) -> str:
    return "output_text" if role == "assistant" else "input_text"


def _wire(kind: str, item_id: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": item_id or new_id("item"), "object": "realtime.item", "type": kind, "status": "completed", **fields}


def spoken_item(item_id: str, samples: npt.NDArray[np.float32]) -> Item:
    """The item of a user's turn: float32 `[samples]`, mono, at 16 kHz."""
    content = [{"type": "input_audio", "transcript": None}]
    wire = _wire("message", item_id, {"role": "user", "content": content})
    return Item(wire, {"role": "user", "content": [{"type": "audio"}]}, audios=[samples])


class Conversation:
    """Items in their order. Bounded by their number, and by the bytes of all that is in them."""

    def __init__(self, most_items: int, most_bytes: int) -> None:
        self._items: list[Item] = []
        self._most_items, self._most_bytes = most_items, most_bytes

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def fork(self) -> Conversation:
        """Another one that has the same items so far."""
        other = Conversation(self._most_items, self._most_bytes)
        other._items = list(self._items)
        return other

    @property
    def last_id(self) -> str | None:
        return self._items[-1].id if self._items else None

    def add(self, item: Item, previous_id: str | None = None, *, drops_oldest: bool = True) -> str | None:
        """Puts it behind the item of that id, at the front for "root", at the end for None; returns what it is behind.

        Raises BadRequest, and then nothing has changed. `drops_oldest`: the oldest items make room where there is none.
        """
        self._check(item)
        self._behind(previous_id)  # an id that none has is refused before any is dropped
        self._items = self._with_room(item, previous_id, drops_oldest)
        place = self._behind(previous_id)
        self._items.insert(place, item)
        return self._items[place - 1].id if place else None

    def _check(self, item: Item) -> None:
        if any(each.id == item.id for each in self._items):
            raise BadRequest(
                f"item.id is {item.id!r}, which another item has; send one of your own, or none.",
                param="item.id",
                code="item_create_duplicate_item_id",
            )
        if item.num_bytes > self._most_bytes:
            raise BadRequest(
                f"The item has {item.num_bytes} bytes, but a conversation has at most {self._most_bytes}; send less.",
                param="item",
                code="item_too_large",
            )

    def _behind(self, previous_id: str | None) -> int:
        if previous_id is None:
            return len(self._items)
        return 0 if previous_id == "root" else self._place(previous_id) + 1

    def _with_room(self, item: Item, kept_id: str | None, drops_oldest: bool) -> list[Item]:
        """The items beside which there is room for it: all but the oldest that are no instruction, nor of the id."""
        dropped, sizes = set[str](), {each.id: each.num_bytes for each in self._items}
        most, held = self._most_bytes - item.num_bytes, sum(sizes.values())
        droppable = (each.id for each in self._items if each.message["role"] != "system" and each.id != kept_id)
        while held > most or len(sizes) - len(dropped) >= self._most_items:
            oldest = next(droppable, None) if drops_oldest else None
            if oldest is None:
                raise self._full(item)
            dropped.add(oldest)
            held -= sizes[oldest]
        return [each for each in self._items if each.id not in dropped]

    def _full(self, item: Item) -> BadRequest:
        held = sum(each.num_bytes for each in self._items)
        return BadRequest(
            f"The conversation has {len(self._items)} items with {held} bytes, and at most {self._most_items} "
            f"with {self._most_bytes} are kept, so there is no space for {item.num_bytes} more; delete some.",
            param="item",
            code="conversation_full",
        )

    def get(self, item_id: str, code: str) -> Item:
        """Raises BadRequest with `code` for an id that none has."""
        return self._items[self._place(item_id, code)]

    def delete(self, item_id: str) -> None:
        """Raises BadRequest."""
        del self._items[self._place(item_id, "item_delete_invalid_item_id")]

    def _place(self, item_id: str, code: str = "invalid_value") -> int:
        for place, item in enumerate(self._items):
            if item.id == item_id:
                return place
        raise BadRequest(f"No item of the conversation has the id {item_id!r}.", param="item_id", code=code)
