"""The answers of `POST /v1/responses`: the response as it grows, and the events that tell a stream's client of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_cluster.openai_api.completion import Usage, logprobs
from omni_cluster.openai_api.responses import ResponsesRequest
from omni_cluster.types.outputs import CallDelta, TokenChoice

Event = dict[str, Any]


class _Message:
    """A message of one text part, while it is written."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._id = _new_id("msg")
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> Iterator[Event]:
        yield self._event("response.output_item.added", item=self.item("in_progress", []))
        yield self._part_event("response.content_part.added", part=_text_part("", []))

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._pieces.append(text)
        self._logprobs += logprobs
        return self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def closed(self, status: str) -> Iterator[Event]:
        part = self._part()
        yield self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", item=self.item(status))

    def item(self, status: str, content: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        content = [self._part()] if content is None else content
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return _text_part("".join(self._pieces), self._logprobs)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": self._index, **fields}


class _Call:
    """A call of one of the client's functions, while it is written."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._index = index
        self._id = _new_id("fc")
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def opened(self) -> Iterator[Event]:
        yield self._event("response.output_item.added", item=self.item("in_progress"))

    def push(self, arguments: str) -> Event:
        self._pieces.append(arguments)
        return self._event("response.function_call_arguments.delta", item_id=self._id, delta=arguments)

    def closed(self, status: str) -> Iterator[Event]:
        said = {"item_id": self._id, "name": self._name, "arguments": "".join(self._pieces)}
        yield self._event("response.function_call_arguments.done", **said)
        yield self._event("response.output_item.done", item=self.item(status))

    def item(self, status: str) -> dict[str, Any]:
        call = {"call_id": self._call_id, "name": self._name, "arguments": "".join(self._pieces)}
        return {"id": self._id, "type": "function_call", "status": status, **call}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": self._index, **fields}


class ResponseAnswer:
    """One response. Each method returns the events that tell of what it did, in OpenAI's order.

    Not streamed, the events are of no use: `body` is the whole response.
    """

    def __init__(
        self, request: ResponsesRequest, *, response_id: str | None = None, created_at: int | None = None
    ) -> None:
        self.id = response_id or _new_id("resp")
        self._created_at = int(time.time()) if created_at is None else created_at
        self._request = request
        self._done: list[dict[str, Any]] = []
        self._open: _Message | _Call | None = None
        self._ending: dict[str, Any] = {"status": "in_progress"}
        self._next_number = 0

    def start(self) -> list[Event]:
        """That it is made, and begins."""
        body = self.body()
        return self._numbered({"type": f"response.{what}", "response": body} for what in ("created", "in_progress"))

    def text(self, text: str, choices: Sequence[TokenChoice] = ()) -> list[Event]:
        """A piece of the text, and its tokens' logprobs where the client asked for them."""
        events: list[Event] = []
        message = self._open
        if not isinstance(message, _Message):
            events += self._close("completed")
            message = _Message(len(self._done))
            events += self._begin(message)
        found = logprobs(self._request.chat, choices)
        return events + self._numbered([message.push(text, found["content"] if found else [])])

    def call(self, call_id: str, name: str, arguments: str = "") -> list[Event]:
        """A call of a function begins, with the first piece of its arguments."""
        events = self._close("completed")
        events += self._begin(_Call(len(self._done), call_id, name))
        return events + self.arguments(arguments)

    def calls(self, deltas: Sequence[CallDelta]) -> list[Event]:
        """Pieces of calls, each call begun after the one before it has all."""
        events: list[Event] = []
        for delta in deltas:
            if delta.id is None:
                events += self.arguments(delta.arguments)
            else:
                events += self.call(delta.id, delta.name or "", delta.arguments)
        return events

    def arguments(self, piece: str) -> list[Event]:
        """A further piece of the arguments of the call that began last."""
        return self._numbered([self._open.push(piece)]) if piece and isinstance(self._open, _Call) else []

    def end(self, finish_reason: str, usage: Usage, **additions: Any) -> list[Event]:
        """Why it ended, in a chat's words. An answer of nothing at all is a message without text."""
        events = [] if self._open or self._done else self._begin(_Message(0))
        status = "incomplete" if finish_reason == "length" else "completed"
        events += self._close(status)
        self._ending = {"status": status, "usage": _usage(usage), **additions}
        if status == "incomplete":
            self._ending["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._ending["completed_at"] = int(time.time())
        return events + self._numbered([{"type": f"response.{status}", "response": self.body()}])

    def fail(self, error: Mapping[str, Any]) -> list[Event]:
        """`error`: as of an error's answer. Clients read it in one of two places: what is documented, and `error`."""
        self._ending = {"status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        said = {name: error[name] for name in ("code", "message", "param")}
        told = {"type": "error", **said, "error": dict(error)}
        return self._numbered([told, {"type": "response.failed", "response": self.body()}])

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": None,
            "error": None,
            "incomplete_details": None,
            "model": self._request.chat.model,
            "output": [*self._done, *([self._open.item("incomplete")] if self._open else ())],
            "usage": None,
            **self._request.repeated,
            **_NEVER,
            **self._ending,
        }

    def _begin(self, item: _Message | _Call) -> list[Event]:
        self._open = item
        return self._numbered(item.opened())

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._done.append(item.item(status))
        return self._numbered(item.closed(status))

    def _numbered(self, events: Iterator[Event] | Sequence[Event]) -> list[Event]:
        numbered = [event | {"sequence_number": number} for number, event in enumerate(events, self._next_number)]
        self._next_number += len(numbered)
        return numbered


_NEVER: Mapping[str, Any] = {
    "background": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""The same for every response: what is not offered, in OpenAI's words."""


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
