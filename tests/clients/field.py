"""The clients of the field that are run, and what each of them does."""

from __future__ import annotations

from tests.clients.runs import Client

_CHAT = ("chat", "stream", "second turn", "image")
_OPENAI = (
    "models", *_CHAT, "sound in", "developer", "sound out", "spoken second turn", "streamed sound",
    "program of the page", "tool", "structured", "parse", "completions", "transcription", "translation", "speech",
    "responses", "responses stream", "responses second turn", "responses tool", "refused",
)  # fmt: skip
_TYPED = ("structured", "structured by a schema")
_AI_SDK = ("second turn", "image", "structured", "tool")

CLIENTS = (
    Client("openai-1", "openai_python.py", "openai1", _OPENAI, marks=("full",)),
    Client("openai-2", "openai_python.py", "openai2", _OPENAI, marks=("full",)),
    Client("openai-3", "openai_python.py", None, _OPENAI, marks=()),
    Client(
        "litellm", "litellm_sdk.py", "litellm",
        (*_CHAT, "sound in", "sound out", "tool", "structured", "completions", "transcription", "speech", "responses",
         "too long"),
        marks=("full",),
    ),
    Client(
        "pydantic-ai", "pydantic_ai_agent.py", "pydantic_ai",
        (*_CHAT, "sound in", *_TYPED, "tool", "responses", "responses stream", "responses structured"),
        marks=("full",),
    ),
    Client(
        "openai-agents", "openai_agents.py", "openai_agents",
        (*_CHAT, "structured", "tool", "responses", "responses stream", "responses image", "responses structured",
         "responses tool", "transcription", "voice"),
        marks=("full",),
    ),
    Client(
        "langchain", "langchain_chat.py", "langchain",
        (*_CHAT, "sound in", "sound out", "spoken second turn", "tool", "structured", "structured by a tool",
         "responses"),
    ),
    Client(
        "llama-index", "llama_index_like.py", "llama_index",
        ("completions", *_CHAT, "sound in", "tool", "structured"),
    ),
    Client("instructor", "instructor_objects.py", "instructor", _TYPED),
    Client("smolagents", "smolagents_model.py", "smolagents", ("chat", "stream", "second turn", "tool", "structured")),
    Client("dspy", "dspy_predict.py", "dspy", ("chat", "json object")),
    Client(
        "semantic-kernel", "semantic_kernel_chat.py", "semantic_kernel",
        (*_CHAT, "structured", "switch", "transcription", "speech"),
    ),
    Client(
        "openai-node", "openai_node.mjs", "node",
        ("models", *_CHAT, "sound in", "sound out", "spoken second turn", "tool", "parse", "transcription", "speech",
         "responses", "responses stream"),
    ),
    Client(
        "ai-sdk", "ai_sdk.mjs", "node",
        ("chat", "stream", *_AI_SDK, "sound in", "openai chat", "openai chat stream",
         *(f"openai chat {did}" for did in (*_AI_SDK, "sound in")), "responses", "responses stream",
         *(f"responses {did}" for did in _AI_SDK), "speech", "transcription"),
    ),
    Client(
        "pipecat", "pipecat_voice.py", "pipecat",
        ("chat", "stream", "second turn", "developer", "speech", "padded transcription"),
    ),
    Client(
        "livekit", "livekit_voice.py", "livekit",
        ("stream", "second turn", "image", "tool", "speech", "English transcription"),
    ),
    Client(
        "litellm-proxy", "litellm_proxy.py", "litellm_proxy",
        ("responses", "chat", "stream", "second turn", "transcription", "speech", "messages", "chat after embeddings"),
    ),
    Client(
        "open-webui", "open_webui_headless.py", "open_webui",
        ("models", "chat", "stream", "second turn", "voices", "speech", "transcription"),
    ),
    Client("vllm-bench", "vllm_bench.py", None, ("load", "load of completions")),
    Client("aiperf", "aiperf_load.py", "aiperf", ("load", "load of completions", "load of responses")),
    Client("guidellm", "guidellm_load.py", "guidellm", ("load",)),
    Client("lm-eval", "lm_eval_questions.py", "lm_eval", ("chat", "completions")),
)  # fmt: skip

_SPOKEN = ("spoken turn", "second turn", "interruption", "tool", "dropped connection")
REALTIME_CLIENTS = (
    Client("openai-realtime", "openai_realtime.py", None, _SPOKEN, marks=("full",)),
    Client("openai-agents-realtime", "openai_agents_realtime.py", "openai_agents", _SPOKEN, marks=("full",)),
    Client("pipecat-realtime", "pipecat_realtime.py", "pipecat", _SPOKEN),
    Client("livekit-realtime", "livekit_realtime.py", "livekit", _SPOKEN),
    Client("openai-node-realtime", "openai_node_realtime.mjs", "node", _SPOKEN, marks=("full",), program="openssl"),
)
