"""Bodies of a given size that are made to cost: each is refused, for little."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MODEL = "preset:tiny"
_HELLO = b'"model": "%s", "messages": [{"role": "user", "content": "Hi"}]' % MODEL.encode()


def _chat(field: bytes) -> bytes:
    return b"{" + _HELLO + b", " + field + b"}"


def _messages(entries: bytes) -> bytes:
    return b'{"model": "%s", "messages": [%s]}' % (MODEL.encode(), entries)


def _content(content: bytes) -> bytes:
    return _messages(b'{"role": "user", "content": %s}' % content)


def _many(entry: bytes, size: int) -> bytes:
    return (entry + b",") * max(1, size // (len(entry) + 1)) + entry


def _keys(value: bytes, size: int) -> bytes:
    """Of a million bytes each is another one."""
    keys = b",".join(b'"%08x":%s' % (i, value) for i in range(min(size, 1_000_000) // (12 + len(value))))
    return _many(keys, size) if size > len(keys) else keys


def _text(letters: bytes, size: int) -> bytes:
    return b'"' + letters * (size // len(letters)) + b'"'


HOSTILE: Mapping[str, Callable[[int], bytes]] = {
    "zeros for messages": lambda size: _messages(_many(b"0", size)),
    "zeros for parts": lambda size: _content(b"[%s]" % _many(b"0", size)),
    "parts of no type": lambda size: _content(b"[%s]" % _many(b"{}", size)),
    "parts without text": lambda size: _content(b"[%s]" % _many(b'{"type":"text"}', size)),
    "zeros for tools": lambda size: _chat(b'"tools": [%s]' % _many(b"0", size)),
    "zeros for modalities": lambda size: _chat(b'"modalities": [%s]' % _many(b"0", size)),
    "empty stops": lambda size: _chat(b'"stop": [%s]' % _many(b'""', size)),
    "texts for token ids": lambda size: _chat(
        b'"stage_sampling_params": {"talker": {"stop_token_ids": [%s]}}' % _many(b'"a"', size)
    ),
    "zeros for stages": lambda size: _chat(b'"sampling_params_list": [%s]' % _many(b"0", size)),
    "zeros for frames": lambda size: _content(b'[{"type":"video","video":[%s]}]' % _many(b"0", size)),
    "zeros for calls": lambda size: _messages(b'{"role": "assistant", "tool_calls": [%s]}' % _many(b"0", size)),
    "zeros nobody reads": lambda size: _chat(b'"metadata": [%s]' % _many(b"0", size)),
    "stages by many names": lambda size: _chat(b'"stage_sampling_params": {%s}' % _keys(b"0", size)),
    "sampling by many names": lambda size: _chat(b'"stage_sampling_params": {"talker": {%s}}' % _keys(b"0", size)),
    "options by many names": lambda size: _chat(b'"mm_processor_kwargs": {%s}' % _keys(b"0", size)),
    "fields by many names": lambda size: b"{%s}" % _keys(b"0", size),
    "one field again and again": lambda size: b"{%s}" % _many(b'"model": "a"', size),
    "nested lists": lambda size: _chat(b'"tools": ' + b"[" * size),
    "nested objects": lambda size: _chat(b'"tools": ' + b'{"a":' * (size // 5)),
    "a long number": lambda size: _chat(b'"n": ' + b"1" * size),
    "a long fraction": lambda size: _chat(b'"n": 0.' + b"1" * size),
    "a name of all": lambda size: b'{"model": %s, "messages": [{"role": "user", "content": "Hi"}]}' % _text(b"a", size),
    "a key of all": lambda size: _chat(b'"stage_sampling_params": {"talker": {%s: 1}}' % _text(b"a", size)),
    "a stage of all": lambda size: _chat(b'"stage_sampling_params": {%s: {"heat": 1}}' % _text(b"a", size)),
    "a text of all": lambda size: _content(_text(b"a", size)),
    "a text of escapes": lambda size: _content(_text(b"\\u0041", size)),
    "a text of line ends": lambda size: _content(_text(b"\\n", size)),
    "a text of wide letters": lambda size: _content(_text("é".encode(), size)),
    "a text of one wide letter": lambda size: _content(b'"' + "😀".encode() + b"a" * size + b'"'),
    "a text of marks": lambda size: _content(_text(b"<|im_end|>", size)),
    "a description of all": lambda size: _chat(
        b'"tools": [{"type": "function", "function": {"name": "f", "description": %s}}]' % _text(b"a", size)
    ),
    "arguments of all": lambda size: _messages(
        b'{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": %s}}]}'
        % _text(b"a", size)
    ),
    "an id of all": lambda size: _messages(b'{"role": "tool", "content": "x", "tool_call_id": %s}' % _text(b"a", size)),
    "a URL of all": lambda size: _content(
        b'[{"type": "image_url", "image_url": {"url": %s}}]' % _text(b"http://a.example/", size)
    ),
    "no base64": lambda size: _content(
        b'[{"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}]' % (b"*" * size)
    ),
    "blanks": lambda size: b"{" + _HELLO + b" " * size,
    "a list cut off": lambda size: b'{"messages": [' + b"0," * (size // 2),
}
