"""Open WebUI without a browser: its server, asked as its page asks it."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from programs import free_port, got, posted, running
from told import FOLDER, KEY, MAX_TOKENS, MODEL, QUESTION, SAID, SECOND_QUESTION, URL, WAV, doing, kept

PORT = free_port()
AT = f"http://127.0.0.1:{PORT}"
COMMAND = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
SETTINGS = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "none",
    "DATA_DIR": str(FOLDER / "data"),
    "OFFLINE_MODE": "True",
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",
    "OPENAI_API_BASE_URL": URL,
    "OPENAI_API_KEY": KEY,
    **{f"AUDIO_{kind}_ENGINE": "openai" for kind in ("TTS", "STT")},
    **{f"AUDIO_{kind}_OPENAI_API_BASE_URL": URL for kind in ("TTS", "STT")},
    **{f"AUDIO_{kind}_OPENAI_API_KEY": KEY for kind in ("TTS", "STT")},
    **{f"AUDIO_{kind}_MODEL": MODEL for kind in ("TTS", "STT")},
}
BORDER = "question-border"


def signed_in() -> dict[str, str]:
    token = json.loads(posted(f"{AT}/api/v1/auths/signin", {"email": "", "password": ""}, {}))["token"]
    return {"Authorization": f"Bearer {token}"}


def read(path: str, headers: dict[str, str]) -> Any:
    return json.loads(got(urllib.request.Request(f"{AT}{path}", headers=headers)))


def asked(messages: list[Any], headers: dict[str, str], **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    return posted(f"{AT}/api/chat/completions", body, headers)


def text(messages: list[Any], headers: dict[str, str]) -> str:
    return json.loads(asked(messages, headers, stream=False))["choices"][0]["message"]["content"]


def streamed(messages: list[Any], headers: dict[str, str]) -> str:
    lines = asked(messages, headers, stream=True).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def microphone(headers: dict[str, str]) -> str:
    head = f'--{BORDER}\r\nContent-Disposition: form-data; name="file"; filename="question.wav"\r\n'
    body = head.encode() + b"Content-Type: audio/wav\r\n\r\n" + WAV + f"\r\n--{BORDER}--\r\n".encode()
    kind = f"multipart/form-data; boundary={BORDER}"
    return json.loads(posted(f"{AT}/api/v1/audio/transcriptions", body, headers, kind))["text"]


def ask() -> None:
    headers = signed_in()
    user = {"role": "user", "content": QUESTION}
    with doing("models") as seen:
        seen["ids"] = [
            model["id"] for model in read("/api/models", headers)["data"] if model.get("owned_by") == "openai"
        ]
    with doing("chat") as seen:
        seen["text"] = text([user], headers)
    with doing("stream") as seen:
        seen["text"] = streamed([user], headers)
    with doing("second turn") as seen:
        earlier = {"role": "assistant", "content": text([user], headers)}
        seen["text"] = text([user, earlier, {"role": "user", "content": SECOND_QUESTION}], headers)
    with doing("voices") as seen:
        seen["voices"] = [voice["id"] for voice in read("/api/v1/audio/voices", headers)["voices"]]
    with doing("speech") as seen:
        # Its page sends the voice of its settings, which is OpenAI's first one.
        said = posted(f"{AT}/api/v1/audio/speech", {"model": MODEL, "input": SAID, "voice": "alloy"}, headers)
        seen["file"] = kept("speech.mp3", said)
    with doing("transcription") as seen:
        seen["text"] = microphone(headers)


with running(COMMAND, f"{AT}/health", {**os.environ, **SETTINGS}):
    ask()
