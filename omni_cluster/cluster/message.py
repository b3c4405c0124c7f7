"""A connection's message as the parts of a frame: a MessagePack head, then each array in it, not copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from omni_cluster.cluster.failures import StageFailed, lost_with
from omni_cluster.cluster.transport import MessageItem
from omni_cluster.errors import OmniError, PayloadError


def packed(message: list[MessageItem]) -> list[Any]:
    """The message's head, and the arrays in it."""
    arrays: list[memoryview] = []

    def reference(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.data.cast("B") if value.size else memoryview(b""))
            return len(arrays), value.dtype.str
        if isinstance(value, Exception):
            return kinds_of(value), str(value), getattr(value, "replica_id", "")
        raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")

    head = msgspec.msgpack.encode(message, enc_hook=reference)
    return [head, *arrays]


def unpacked(parts: Sequence[bytes | bytearray]) -> list[MessageItem]:
    """What `packed` was given. Raises PayloadError for what it did not make."""

    def resolve(kind: type, value: Any) -> Any:
        if kind is np.ndarray:
            part, dtype = value
            return np.frombuffer(parts[part], dtype)
        return error_named(*value)

    try:
        return msgspec.msgpack.decode(parts[0], type=list[MessageItem], dec_hook=resolve)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError) as error:
        raise PayloadError(f"A message of {len(parts)} parts is not what replicas send: {error}.") from None


def kinds_of(error: Exception) -> list[str]:
    """Names of the error's class and of those of ours that it is a kind of: its reader may not have all of them."""
    return [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, OmniError)]


def error_named(names: Sequence[str], message: str, replica_id: str = "") -> Exception:
    """Our error of the first name that is known here, with its message; StageFailed if none is."""
    known = {kind.__name__: kind for kind in _kinds(OmniError)}
    error = next((known[name] for name in names if name in known), StageFailed)(message)
    return lost_with(error, replica_id)


def _kinds(base: type[OmniError]) -> Iterator[type[OmniError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
