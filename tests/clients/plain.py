"""What the server says to a plain HTTP client: the clients' answers are compared with it."""

from __future__ import annotations

import base64
import functools
from pathlib import Path
from typing import Any

import httpx

from tests.http_app import MODEL

QUESTION, SECOND_QUESTION = "Tell me.", "And then?"
MAX_TOKENS = 16
_TEXT_PART = {"type": "text", "text": QUESTION}


class Plain:
    """Asks once for each thing that is compared."""

    def __init__(self, client: httpx.Client, folder: Path) -> None:
        self._client = client
        self._folder = folder

    @functools.cached_property
    def text(self) -> str:
        """The answer to the question, at temperature 0."""
        return self._said(self._user(QUESTION))

    @functools.cached_property
    def second_text(self) -> str:
        """The answer to a second question behind the first one's answer."""
        earlier = {"role": "assistant", "content": self.text}
        return self._said(self._user(QUESTION), earlier, self._user(SECOND_QUESTION))

    @functools.cached_property
    def text_of_picture(self) -> str:
        return self._said(self._user([_TEXT_PART, self._picture_part]))

    @functools.cached_property
    def text_of_picture_first(self) -> str:
        return self._said(self._user([self._picture_part, _TEXT_PART]))

    @functools.cached_property
    def instructed_text(self) -> str:
        return self._said({"role": "system", "content": "Be brief."}, self._user(QUESTION))

    @functools.cached_property
    def text_of_sound(self) -> str:
        sound = {"data": self._in_base64("question.wav"), "format": "wav"}
        return self._said(self._user([_TEXT_PART, {"type": "input_audio", "input_audio": sound}]))

    @functools.cached_property
    def completion(self) -> str:
        body = {"model": MODEL, "prompt": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 0}
        return self._answer("/v1/completions", json=body)["choices"][0]["text"]

    @functools.cached_property
    def transcript(self) -> str:
        return self._heard("transcriptions")

    @functools.cached_property
    def english_transcript(self) -> str:
        """By a client that says the language."""
        return self._heard("transcriptions", language="en")

    @functools.cached_property
    def translation(self) -> str:
        return self._heard("translations")

    def _heard(self, endpoint: str, **fields: str) -> str:
        file = ("question.wav", (self._folder / "question.wav").read_bytes())
        return self._answer(f"/v1/audio/{endpoint}", data={"model": MODEL, **fields}, files={"file": file})["text"]

    @property
    def _picture_part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{self._in_base64('picture.png')}"}}

    def _user(self, content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    def _in_base64(self, name: str) -> str:
        return base64.b64encode((self._folder / name).read_bytes()).decode()

    def _said(self, *messages: dict[str, Any]) -> str:
        body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        return self._answer("/v1/chat/completions", json=body)["choices"][0]["message"]["content"]

    def _answer(self, path: str, **sent: Any) -> dict[str, Any]:
        answer = self._client.post(path, **sent)
        assert answer.status_code == 200, answer.text
        return answer.json()
