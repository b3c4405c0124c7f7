"""How much text a chat may hold: more than any prompt is refused before it is rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import Message
from omni_cluster.openai_api.tools import Tool
from omni_cluster.types.nested import all_strings


def check_text(messages: Sequence[Message], tools: Sequence[Tool], limits: ApiLimits) -> None:
    """Raises BadRequest for text that no prompt has room for; media are none."""
    chars = sum(len(text) for text in _texts(messages, tools))
    if chars > limits.max_text_chars:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_prompt_tokens} tokens: the messages and tools have "
            f"{chars} characters of text, but at most {limits.max_text_chars} are accepted.",
            param="messages",
            code="context_length_exceeded",
        )


def _texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    for message in messages:
        yield from message.texts
        yield message.tool_call_id or ""
        for call in message.tool_calls or ():
            yield from (call.id, call.function.name, call.function.arguments)
    yield from all_strings([tool.model_dump() for tool in tools])
