"""What tells one conversation from another, the same for each of its turns and in every process."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import takewhile

import numpy as np

from omni_cluster.openai_api.chat import ChatRequest

SAMPLED = 4_096
"""Values of a medium that are looked at: two sounds, pictures or videos that agree in all of them are taken for one."""


def conversation_of(chat: ChatRequest) -> bytes:
    """A digest of all up to the first message of the user, its media among it; empty if there is none."""
    before = list(takewhile(lambda message: message["role"] != "user", chat.messages))
    beginning = chat.messages[: len(before) + 1]
    if len(beginning) == len(before):
        return b""
    digest = hashlib.blake2b(repr(beginning).encode("utf-8", "surrogatepass"), digest_size=16)
    for medium in _media_of(chat, Counter(part["type"] for message in beginning for part in message["content"])):
        digest.update(repr(medium.shape).encode())
        digest.update(medium.reshape(-1)[:: medium.size // SAMPLED + 1].tobytes())
    return digest.digest()


def _media_of(chat: ChatRequest, parts: Counter[str]) -> list[np.ndarray]:
    return [
        *chat.audios[: parts["audio"]],
        *chat.images[: parts["image"]],
        *(video.frames for video in chat.videos[: parts["video"]]),
    ]
