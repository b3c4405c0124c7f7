"""The playground in a browser, over the default application: what the server sends is what is shown and played."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from omni_cluster.demo import SPOKEN_QUESTION, png_bytes, question_picture
from tests.browser import RATE_HZ, Samples, Tab, is_of, tab, written
from tests.http_app import nothing_is_left
from tests.openai_api.films import video_file
from tests.served.app import BASE_URL, STAGES, ServedApp, until
from tests.server.realtime.spoken import sentences, silence

pytestmark = pytest.mark.full

FILES = {
    "disc.png": ("image/png", png_bytes(question_picture())),
    "voice.wav": ("audio/wav", SPOKEN_QUESTION.read_bytes()),
    "film.mp4": ("video/mp4", video_file("mp4")),
}
PAUSE_S = 2.0
"""In which a turn ends, and the microphone can be muted."""


@asynccontextmanager
async def playground(served: ServedApp, speech: Path | None = None) -> AsyncIterator[Tab]:
    async with tab(BASE_URL, speech, repeats=True) as opened:
        await opened.page.get_by_text(served.model).wait_for()
        yield opened
    await until(lambda: nothing_is_left(served), "nothing is left of it")


async def streamed(page: Tab, text: str) -> tuple[str, Samples]:
    """What the server says to a message."""
    async with page.page.expect_event("requestfinished", lambda asked: "/chat/completions" in asked.url) as finished:
        await page.ask(text)
    body = await (await (await finished.value).response()).text()
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    sound = b"".join(base64.b64decode(delta.get("audio", {}).get("data", "")) for delta in deltas)
    return "".join(delta.get("content") or "" for delta in deltas), np.frombuffer(sound, np.int16)


async def test_it_types_and_plays_all_that_the_server_sends_in_order(served: ServedApp) -> None:
    async with playground(served) as page:
        text, sound = await streamed(page, "Hello world.")
        await page.answered()
        assert await page.texts("answer") == [text] and text
        played = await page.recorded()
        np.testing.assert_array_equal(played[played != 0], sound[sound != 0])
        assert np.abs(played.astype(int)).max() > 100
        await page.page.locator(".times summary").click()
        rows = await page.page.locator(".times tbody th").all_text_contents()
        assert rows == ["Request", *STAGES, "Text", "Sound", "Playing"]


async def test_a_picture_a_sound_and_a_film_are_dropped_and_answered(served: ServedApp, pictures: Path) -> None:
    async with playground(served) as page:
        for name, (media_type, data) in FILES.items():
            await page.drop(name, media_type, data)
        await until(lambda: has_files(page), "the files are attached")
        text, sound = await streamed(page, "What do you see?")
        await page.answered()
        assert await page.texts("answer") == [text] and text and len(sound)
        await page.page.locator(".times summary").click()
        for name, width in (("phone", 390), ("desk", 1200)):
            await page.show(pictures, f"files-{name}", width=width)


async def has_files(page: Tab) -> bool:
    return await page.page.locator("#files li").count() == len(FILES)


async def test_it_cancels(served: ServedApp) -> None:
    async with playground(served) as page:
        await page.ask("Tell me a long story.")
        await page.until("document.querySelector('.answer .text')?.textContent")
        await page.page.keyboard.press("Escape")
        await page.page.get_by_text("interrupted").wait_for()
        await until(lambda: nothing_is_left(served), "all stages end it")


async def test_it_speaks_and_interrupts(served: ServedApp, tmp_path: Path) -> None:
    speech = np.concatenate([silence(0.5), sentences()[0], silence(PAUSE_S)])
    async with playground(served, written(tmp_path / "speech.wav", speech, RATE_HZ)) as page:
        await page.page.get_by_role("button", name="Speak").click()
        await page.until("document.querySelector('.answer')")
        await page.mute(True)
        await page.until("recorded.some((samples) => samples.some((sample) => sample !== 0))")
        await page.mute(False)
        await page.page.get_by_text("interrupted").first.wait_for()
        await page.until("document.querySelector('.answer:last-child[aria-busy=true]')")
        await page.mute(True)
        await page.until("document.getElementById('stop').hidden")
        played = await page.recorded()
        assert is_of(played[played != 0], page.answers())
        await page.page.get_by_role("button", name="Speak").click()
        await page.until("document.getElementById('talk').getAttribute('aria-pressed') === 'false'")
