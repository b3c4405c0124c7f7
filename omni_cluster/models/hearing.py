"""The words by which Qwen's omni models are asked to write down what is said, as their authors publish them.

Their recognition prompts end in "without any punctuation marks", by which their error rates are measured: that part is
left out, for transcripts are read.
"""

from __future__ import annotations

from typing import Any, Final

from omni_cluster.models.family import Hearing

CHINESE: Final = "请将这段中文语音转换为纯文本。"


def question_of(hearing: Hearing) -> dict[str, Any]:
    """The client's turn with one audio part, for the chat template."""
    asked = f"{_instruction(hearing)}\nContext: {hearing.hint}" if hearing.hint else _instruction(hearing)
    return {"role": "user", "content": [{"type": "text", "text": asked}, {"type": "audio"}]}


def _instruction(hearing: Hearing) -> str:
    spoken = f"{hearing.language} " if hearing.language else ""
    if hearing.into is not None:
        return f"Listen to the provided {spoken}speech and produce a translation in {hearing.into} text."
    return CHINESE if hearing.language == "Chinese" else f"Transcribe the {spoken}audio into text."
