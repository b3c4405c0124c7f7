"""What the scripts share: what they ask, and how they say what they saw. It needs no package.

A script is run with the server's URL, the model, and a folder with `question.wav` and `picture.png`; it writes the
files that it was given there too. For each thing that it did it prints a line of JSON.
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ADDRESS, MODEL = sys.argv[1:3]
FOLDER = Path(sys.argv[3])
URL = f"{ADDRESS}/v1"
KEY = "none"

QUESTION = "Tell me."
SECOND_QUESTION = "And then?"
MAX_TOKENS = 16
MAX_OBJECT_TOKENS = 200
"""Of calls and objects, which must be whole."""
SAID = "Good morning."

WAV = (FOLDER / "question.wav").read_bytes()
PNG = (FOLDER / "picture.png").read_bytes()
WAV_BASE64 = base64.b64encode(WAV).decode()
PNG_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"

LAMP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"type": "string", "enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["color", "on"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "set_lamp", "description": "Sets the lamp.", "parameters": LAMP_SCHEMA},
}
TOOL_RESULT = "The lamp is set."


@contextmanager
def doing(did: str) -> Iterator[dict[str, Any]]:
    """Tells what the block saw; a block that fails is told too, and the next ones go on."""
    seen: dict[str, Any] = {}
    try:
        yield seen
    except Exception as error:
        traceback.print_exc()
        _tell(did, ok=False, seen={"error": f"{type(error).__name__}: {error}"})
    else:
        _tell(did, ok=True, seen=seen)


def _tell(did: str, *, ok: bool, seen: dict[str, Any]) -> None:
    print(json.dumps({"did": did, "ok": ok, "seen": seen}), flush=True)


def kept(name: str, data: bytes) -> str:
    """Writes a file that the client was given; its name."""
    (FOLDER / name).write_bytes(data)
    return name
