"""Where bodies are worked on: what takes long for one keeps no other waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.engine.build import bind
from omni_cluster.models.registry import known_families
from omni_cluster.server.reader import LARGE_THREADS, SMALL_BODY_BYTES, Reader
from tests.configs import TINY_CONFIG
from tests.server.speaker import face_of

PATIENCE_S = 60


async def test_prompts_of_large_bodies_keep_no_small_one_waiting(tiny: Path) -> None:
    reader, may_end = Reader(bind(load_config(TINY_CONFIG, known_families=known_families()))), threading.Event()
    large = [
        asyncio.ensure_future(reader.off_loop(lambda: may_end.wait(PATIENCE_S), SMALL_BODY_BYTES + 1))
        for _ in range(10 * LARGE_THREADS)
    ]
    try:
        small = reader.off_loop(lambda: "rendered", SMALL_BODY_BYTES)
        assert await asyncio.wait_for(small, PATIENCE_S / 2) == "rendered"
        assert not any(each.done() for each in large)
    finally:
        may_end.set()
    assert all(await asyncio.gather(*large))
    await reader.close()


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
        ("/v1/responses", {"input": "Hi", "stream": True}),
        ("/v1/audio/speech", {"input": "Hi.", "response_format": "pcm", "stream_format": "audio"}),
        ("/v1/completions", {"prompt": "Hi", "stream": True}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_a_request_without_media_leaves_the_event_loop_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, path: str, asked: dict[str, Any]
) -> None:
    works, off_loop = list[object](), Reader.off_loop

    async def counted(reader: Reader, work: Callable[[], Any], body_bytes: int = 0) -> Any:
        works.append(work)
        return await off_loop(reader, work, body_bytes)

    monkeypatch.setattr(Reader, "off_loop", counted)
    async with face_of(load_config(TINY_CONFIG, known_families=known_families())) as face:
        answer = await face.client.post(path, json={"model": face.speaker.bound.config.model, **asked})
    assert (answer.status_code, len(works)) == (200, 1), answer.text
