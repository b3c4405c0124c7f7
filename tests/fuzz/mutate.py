"""Mutations of what a client or a replica sends, each told by its random source alone."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e-300, 1e308, float("inf"), float("nan"),
    "", " ", "\x00", "\ud7ff", "😀" * 3, "a\nb", "<|im_end|>", "<|AUDIO|>", "<|im_", "|>", "{{ 7 }}", "../etc/passwd",
    "http://127.0.0.1/", "data:image/png;base64,", "data:,", "x" * 5000, [], {}, [[]], [{}], {"": {}}, {"a\nb": 1},
    [0] * 300, "user", "text", "audio", "Chelsie", "talker", "function",
)  # fmt: skip
_ODD_BYTES = (b"", b"\x00", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b'"', b"\\u0000", b"[" * 40, b"1e9")
_MOST_CHANGES = 4


def changed_bytes(data: bytes, rng: Random) -> bytes:
    made = bytearray(data)
    for _ in range(rng.randint(1, _MOST_CHANGES)):
        _change_bytes(made, rng)
    return bytes(made)


def _change_bytes(made: bytearray, rng: Random) -> None:
    at, length = rng.randint(0, len(made)), rng.choice((1, 1, 2, 4, 16, 200))
    match rng.randrange(7):
        case 0 if made:
            made[at % len(made)] ^= 1 << rng.randrange(8)
        case 1 if made:
            made[at % len(made)] = rng.randrange(256)
        case 2:
            made[at:at] = rng.randbytes(length)
        case 3:
            del made[at : at + length]
        case 4:
            made[at:at] = made[at : at + length] * rng.randint(1, 8)
        case 5:
            made[at : at + length] = rng.choice(_ODD_BYTES)
        case _:
            del made[at:]


def changed_body(body: Any, rng: Random) -> bytes:
    """JSON with other values here and there; sometimes with other bytes too."""
    made = changed_values(body, rng)
    data = json.dumps(made, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return changed_bytes(data, rng) if rng.random() < 0.2 else data


def changed_values(body: Any, rng: Random) -> Any:
    """A copy with other values here and there."""
    made = copy.deepcopy(body)
    for _ in range(rng.randint(1, _MOST_CHANGES)):
        made = _changed_value(made, rng)
    return made


def _changed_value(body: Any, rng: Random) -> Any:
    places = [(None, None), *_places(body)]
    holder, key = rng.choice(places)
    if holder is None:
        return body if rng.random() < 0.95 else copy.deepcopy(rng.choice(ODD_VALUES))
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * rng.choice((1, 5, 200))
        case 1:
            holder[rng.choice(("", "type", "extra", "a\nb", f"{key}s"))] = holder[key]
        case 2:
            holder[key] = [holder[key]]
        case 3:
            holder[key] = copy.deepcopy(_at(rng.choice(places), body))
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return body


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Holder and key of every value below."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [(node, key) for key in keys] + [place for key in keys for place in _places(node[key])]


def _at(place: tuple[Any, Any], body: Any) -> Any:
    holder, key = place
    return body if holder is None else holder[key]
