"""Random valid values of the types that OpenAI's package has for requests."""

from __future__ import annotations

import base64
import collections.abc
import io
import random
import types
import typing
import wave
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import typing_extensions
from PIL import Image

MODEL = "preset:tiny"
MOST_ITEMS = 3
"""Of a list: messages, parts, tools."""
MAX_TOKENS = 4


def _wav() -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes((8000 * np.sin(np.arange(1600) / 7)).astype("<i2").tobytes())
    return base64.b64encode(file.getvalue()).decode()


def _png() -> str:
    file = io.BytesIO()
    Image.fromarray(np.arange(28 * 28 * 3, dtype=np.uint8).reshape(28, 28, 3)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


WAV, PNG_URL = _wav(), f"data:image/png;base64,{_png()}"
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
WORDS = ("Tell me.", "And then?", "a", "ünï ☃", "red, green")

_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "speed": (0.25, 4),
    "n": (1, 4),
    "seed": (-(2**63), 2**63 - 1),
    "top_logprobs": (0, 20),
    "max_tokens": (1, MAX_TOKENS),
    "max_completion_tokens": (1, MAX_TOKENS),
    "max_output_tokens": (1, MAX_TOKENS),
    "max_tool_calls": (1, 5),
}
"""What OpenAI's documentation says of a number that its type does not say."""

_TEXTS: Mapping[str, Callable[[random.Random], Any]] = {
    "model": lambda _: MODEL,
    "url": lambda _: PNG_URL,
    "image_url": lambda _: PNG_URL,
    "data": lambda _: WAV,
    "file_data": lambda _: f"data:audio/wav;base64,{WAV}",
    "name": lambda some: some.choice(("set_lamp", "get_time")),
    "file": lambda _: "question.wav",
    "language": lambda some: some.choice(("en", "de")),
    "voice": lambda some: some.choice(("alloy", "Ethan", "verse", {"id": "Chelsie"})),
    "arguments": lambda _: '{"on": true}',
    "parameters": lambda _: SCHEMA,
    "schema": lambda _: SCHEMA,
    "logit_bias": lambda some: {str(some.randrange(500)): some.randint(-100, 100) for _ in range(2)},
    "stop": lambda some: some.choice(("xyz", ["xyz"], ["ab", "cd", "ef", "gh"])),
}
"""What is told by a key alone; whatever it is given is of the type that the key has there."""


class Maker:
    """Makes values of types: a field that may be left out is there with a chance of `given`."""

    def __init__(self, seed: int, given: float) -> None:
        self._some = random.Random(seed)
        self._given = given

    def request(self, params: type, always: Collection[str] = ()) -> dict[str, Any]:
        """A body of a TypedDict of parameters, with `always` in any case; inner objects have more of their fields."""
        return self._object(params, self._given, always)

    def value(self, kind: Any, key: str) -> Any:
        """A value of the type, under that key."""
        kind = _bare(kind)
        if key in _TEXTS and kind is not type(None) and not typing_extensions.is_typeddict(kind):
            return _TEXTS[key](self._some)
        if typing_extensions.is_typeddict(kind):
            return self._object(kind, 0.4)
        origin, inside = get_origin(kind), get_args(kind)
        if origin is Literal:
            return self._some.choice(inside)
        if origin in (Union, types.UnionType):
            return self.value(self._some.choice(inside), key)
        if origin is dict:
            return {self._some.choice(WORDS): self.value(inside[1], "") for _ in range(self._some.randint(0, 2))}
        if inside and isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            return [self.value(inside[0], key) for _ in range(self._some.randint(1, MOST_ITEMS))]
        if inside:  # a list of OpenAI's own, of anything that is no string
            return [self.value(inside[0], key) for _ in range(self._some.randint(1, MOST_ITEMS))]
        return self._plain(kind, key)

    def _object(self, kind: type, given: float, always: Collection[str] = ()) -> dict[str, Any]:
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        required = {key for key, hint in hints.items() if get_origin(hint) is typing_extensions.Required}
        chosen = [key for key in hints if key in required or key in always or self._some.random() < given]
        return {key: self.value(hints[key], key) for key in chosen}

    def _plain(self, kind: Any, key: str) -> Any:
        least, most = _NUMBERS.get(key, (0, 5))
        if kind is bool:
            return self._some.random() < 0.5
        if kind is int:
            return self._some.randint(int(least), int(most))
        if kind is float:
            return self._some.choice((least, most, self._some.uniform(least, most)))
        if kind is type(None):
            return None
        return self._some.choice(WORDS)


def _bare(kind: Any) -> Any:
    """Without what says that a field is required."""
    while get_origin(kind) in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        kind = get_args(kind)[0]
    return kind
