"""litellm's proxy in front of the server, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAI
from programs import free_port, posted, running
from told import FOLDER, KEY, MAX_TOKENS, MODEL, QUESTION, SAID, SECOND_QUESTION, URL, WAV, doing, kept

PORT = free_port()
AT = f"http://127.0.0.1:{PORT}"
PROXY_KEY = "sk-of-the-proxy"
CONFIG = FOLDER / "config.yaml"
COMMAND = [
    *(str(Path(sys.executable).parent / "litellm"), "--config", str(CONFIG), "--host", "127.0.0.1"),
    *("--port", str(PORT)),
]
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0}
USER = {"role": "user", "content": QUESTION}


def ask(client: OpenAI) -> None:
    def text(*messages: Any) -> str:
        return client.chat.completions.create(messages=messages, **ASKED).choices[0].message.content

    with doing("responses") as seen:
        made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0)
        seen["text"] = made.output_text
    with doing("chat") as seen:
        seen["text"] = text(USER)
    with doing("stream") as seen:
        chunks = client.chat.completions.create(messages=[USER], stream=True, **ASKED)
        seen["text"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    with doing("second turn") as seen:
        seen["text"] = text(
            USER, {"role": "assistant", "content": text(USER)}, {"role": "user", "content": SECOND_QUESTION}
        )
    with doing("transcription") as seen:
        seen["text"] = client.audio.transcriptions.create(model=MODEL, file=("question.wav", WAV)).text
    with doing("speech") as seen:
        seen["file"] = kept("speech.mp3", client.audio.speech.create(model=MODEL, input=SAID, voice="alloy").content)
    with doing("messages") as seen:
        headers = {"x-api-key": PROXY_KEY, "anthropic-version": "2023-06-01"}
        made = json.loads(posted(f"{AT}/v1/messages", {**ASKED, "messages": [USER]}, headers))
        seen["text"] = made["content"][0]["text"]
    with doing("chat after embeddings") as seen:
        try:
            client.embeddings.create(model=MODEL, input=QUESTION)
        except NotFoundError:
            seen["text"] = text(USER)


deployment = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
# With cooldowns, a 404 of what the server lacks keeps the proxy from the only deployment, for all clients.
CONFIG.write_text(
    json.dumps(
        {
            "model_list": [{"model_name": MODEL, "litellm_params": deployment}],
            "router_settings": {"disable_cooldowns": True},
        }
    )
)
SETTINGS = {"LITELLM_MASTER_KEY": PROXY_KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
with running(COMMAND, f"{AT}/health/liveliness", {**os.environ, **SETTINGS}):
    ask(OpenAI(base_url=f"{AT}/v1", api_key=PROXY_KEY, max_retries=0))
