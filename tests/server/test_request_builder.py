"""Requests of the pipeline that no JSON was read for, as an endpoint of another protocol makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.registry import known_families
from omni_cluster.server.request_builder import RequestBuilder
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import Media, OmniRequest
from tests.configs import TINY_CONFIG
from tests.server.speaker import Speaker

TALK = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is said?"}]}]


def test_a_request_is_built_of_a_conversation_and_its_media(tiny: Path) -> None:
    pipeline = Speaker(load_config(TINY_CONFIG, known_families=known_families()))
    prompt = pipeline.bound.family.render(TALK)
    media = Media(audios=(np.zeros(16_000, np.float32),))
    draft = OmniRequest("connection-1", prompt, media, voice="Ethan", streams_audio=True)
    first, second = (RequestBuilder(pipeline).build(draft) for _ in range(2))
    assert first.request_id.startswith("connection-1-") and first.request_id != second.request_id
    assert first.seed != second.seed and RequestBuilder(pipeline).build(draft, seed=7).seed == 7
    assert (first.prompt, first.media, first.voice, first.streams_audio) == (prompt, media, "Ethan", True)


def test_what_the_pipeline_refuses_is_not_built(tiny: Path) -> None:
    pipeline = AsyncOmniLLM(load_config(TINY_CONFIG, known_families=known_families()).model_copy(update={"stages": []}))
    with pytest.raises(RequestError, match="no stage here makes sound"):
        RequestBuilder(pipeline).build(OmniRequest("a", "Hello."))
