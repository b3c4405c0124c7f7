"""Media of a row's messages: files and bytes become the data URLs that the API takes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from pyarrow import ArrowException
from pyarrow.fs import FileSystem, FileType, LocalFileSystem

from omni_cluster.batch.errors import BadRow

Part = Mapping[str, Any]

KINDS: Final = ("audio", "image", "video")
_HELD: Final = ("path", "bytes")


def inlined(messages: Any, max_bytes: int) -> Any:
    """The messages with each part that has a `path` or `bytes` as the API's own. Reads files. Raises BadRow.

    A part such as `{"type": "image", "path": "s3://bucket/a.png"}` or `{"type": "audio", "bytes": b"..."}`; all else is
    left as it is, for the API to check.
    """
    return [_message(message, max_bytes) for message in messages] if isinstance(messages, list) else messages


def _message(message: Any, max_bytes: int) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, max_bytes) for part in content]}


def _part(part: Any, max_bytes: int) -> Any:
    held = [name for name in _HELD if name in part] if isinstance(part, Mapping) else []
    if not held:
        return part
    if len(held) > 1:
        raise BadRow("a part of a message has a path and bytes; give one of them.")
    kind = part.get("type")
    if kind not in KINDS:
        raise BadRow(f"a part with {held[0]} has the type {kind!r}; use one of {', '.join(KINDS)}.")
    data = _read(part["path"], max_bytes) if held == ["path"] else _checked(part["bytes"], max_bytes)
    others = {key: value for key, value in part.items() if key not in ("type", *_HELD)}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": _data_url(data)}} | others


def _data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode('ascii')}"


def _checked(data: Any, max_bytes: int) -> bytes:
    if not isinstance(data, bytes):
        raise BadRow(f"bytes of a part is a {type(data).__name__}; give bytes, or a path.")
    _check_size("a part's bytes", len(data), max_bytes)
    return data


def _read(path: Any, max_bytes: int) -> bytes:
    """A file of this host, or one that a URI such as s3://bucket/a.wav names."""
    if not isinstance(path, str) or not path:
        raise BadRow(f"path of a part is {path!r}; give a file's path or URI.")
    try:
        return _read_file(path, max_bytes)
    except (OSError, ArrowException) as error:
        raise BadRow(f"{path!r} cannot be read ({str(error).splitlines()[0][:120]}).", "media_not_found") from None


def _read_file(path: str, max_bytes: int) -> bytes:
    files, place = FileSystem.from_uri(path) if "://" in path else (LocalFileSystem(), path)
    info = files.get_file_info(place)
    if info.type != FileType.File:
        raise BadRow(f"{path!r} is no file; give one that every host of the batch can read.", "media_not_found")
    _check_size(repr(path), info.size, max_bytes)
    with files.open_input_stream(place) as stream:
        return stream.read(max_bytes)


def _check_size(what: str, size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        sentence = f"{what} has {size_bytes} bytes, but at most {max_bytes} are accepted; raise max_media_bytes."
        raise BadRow(sentence, "media_too_large")
