"""How much text a chat may hold: more than any prompt is refused before it is rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_cluster.nested import all_strings
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.messages import Message, TextPart
from omni_cluster.openai_api.tools import Tool


def check_text(messages: Sequence[Message], tools: Sequence[Tool], max_chars: int) -> None:
    """Raises BadRequest for text that no prompt has room for; media are none."""
    chars = sum(len(text) for text in _texts(messages, tools))
    if chars > max_chars:
        raise BadRequest(
            f"The messages and tools have {chars} characters of text, but at most {max_chars} are accepted.",
            param="messages",
            code="context_length_exceeded",
        )


def _texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    for message in messages:
        yield from _content(message)
        yield message.tool_call_id or ""
        for call in message.tool_calls or ():
            yield from (call.id, call.function.name, call.function.arguments)
    yield from all_strings([tool.model_dump() for tool in tools])


def _content(message: Message) -> Iterator[str]:
    if isinstance(message.content, str):
        yield message.content
    else:
        yield from (part.text for part in message.content or () if isinstance(part, TextPart))
