"""The prompts by which the family writes down what is said, as its authors publish them.

Their recognition prompts end in "without any punctuation marks", by which their error rates are measured: that part is
left out, for transcripts are read.
"""

from __future__ import annotations

from typing import Any, Final

from omni_cluster.models.family import Hearing

RECOGNITION: Final = "You are a speech recognition model."
TRANSLATION: Final = "You are a speech translation model."
CHINESE: Final = "请将这段中文语音转换为纯文本。"


def messages_of(hearing: Hearing) -> list[dict[str, Any]]:
    """A conversation with one audio part, for the chat template."""
    system = RECOGNITION if hearing.into is None else TRANSLATION
    asked = [_text(f"{_instruction(hearing)}\nContext: {hearing.hint}" if hearing.hint else _instruction(hearing))]
    return [
        {"role": "system", "content": [_text(system)]},
        {"role": "user", "content": [*asked, {"type": "audio"}]},
    ]


def _instruction(hearing: Hearing) -> str:
    spoken = f"{hearing.language} " if hearing.language else ""
    if hearing.into is not None:
        return f"Listen to the provided {spoken}speech and produce a translation in {hearing.into} text."
    return CHINESE if hearing.language == "Chinese" else f"Transcribe the {spoken}audio into text."


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
