"""What stands around the questions of training: system prompts, and how a transcript is asked for."""

from __future__ import annotations

from typing import Final

from omni_cluster.models.family import Hearing
from omni_cluster.models.hearing import question_of

SPEAKING: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""What the family's authors have the model told where it is to speak."""
SYSTEM_PROMPTS: Final = (
    SPEAKING,
    "You are a helpful assistant.",
    "You are a voice assistant.",
    "You are a friendly assistant. Answer in a few words.",
    "Answer briefly.",
    "Be brief.",
    "Speak slowly.",
    "You are toy.",
)
TRANSCRIBE: Final = tuple(question_of(Hearing(language))["content"][0]["text"] for language in (None, "English"))
