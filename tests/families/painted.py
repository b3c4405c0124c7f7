"""What the toy that paints is asked, and what comes of it."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import httpx

CHAT: Final = "/v1/chat/completions"
SAID: Final = "Good morning"
BODY: Final[dict[str, Any]] = {
    "model": "preset:tiny",
    "messages": [{"role": "user", "content": SAID}],
    "modalities": ["text", "image"],
    "seed": 7,
}


def image_part(png: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}


def png_of(client: httpx.Client, prefix: str = "") -> bytes:
    """The picture of an answer with its text, which is the same whole and streamed."""
    whole = client.post(prefix + CHAT, json=BODY)
    assert whole.status_code == 200, whole.text
    text, part = whole.json()["choices"][0]["message"]["content"]
    png = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    assert (text, part) == ({"type": "text", "text": SAID}, image_part(png))
    streamed = client.post(prefix + CHAT, json=BODY | {"stream": True})
    *lines, done = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines]
    said = {
        kind: [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk.get("modality") == kind]
        for kind in ("text", "image")
    }
    assert "".join(said["text"]) == SAID and said["image"] == [[part]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"
    return png
