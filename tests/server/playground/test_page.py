"""The playground in a browser, over a pipeline that says words and a sound of which every sample is known."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.async_api import Route

from omni_cluster.config.limits import Limits
from omni_cluster.demo import png_bytes, question_picture
from omni_cluster.engine.deadline import Deadline
from omni_cluster.engine.fan_in import StageEvent
from omni_cluster.serve_local import listening, serving
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import AudioChunk, StageChunk
from tests.browser import WIDTHS, Samples, Tab, tab, written
from tests.server.keyed import ONE, config_of
from tests.server.realtime.spoken import sentences, silence
from tests.server.realtime.talk import talk
from tests.server.speaker import RATE_HZ, Speaker

pytestmark = pytest.mark.usefixtures("tiny")

FIRST, PIECE = 24_000, 5_760
"""Of the sound. The first sounds longer than a busy machine takes until the page has the next one."""
WORDS = ("Good ", "morning, ", "said ", "the ", "sea.")
SAID = "".join(WORDS)
"""Of any answer, and so of the transcript of any speech."""


def wave_of(number: int, seconds: float) -> Samples:
    """Of an answer: a sawtooth, above zero in even answers and below in odd ones, and never zero itself."""
    sign = -1 if number % 2 else 1
    return (sign * (np.arange(int(seconds * RATE_HZ)) * 37 % 9_000 + 1)).astype(np.int16)


class Storyteller(Speaker):
    """Says `words` and a wave of `sound_s`, all at once, or the sound once it may."""

    sound_s = 1.5
    words: tuple[str, ...] = WORDS

    async def stream(self, request: OmniRequest, deadline: Deadline) -> AsyncGenerator[StageEvent, None]:
        number = len(self.begun)
        self.begun.append(request.request_id)
        self.running += 1
        try:
            for position, word in enumerate(self.words):
                yield StageEvent("thinker", StageChunk(token_ids=(1,), token_start=position, text=word))
            async with deadline.kept():
                await self.may_speak.wait()
            if request.wants_audio:
                sound = wave_of(number, self.sound_s).astype(np.float32) / 32_768
                start = 0
                for piece in np.split(sound, range(FIRST, len(sound), PIECE)):
                    yield StageEvent("code2wav", StageChunk(audio=AudioChunk(start, piece, RATE_HZ)))
                    start += len(piece)
            yield StageEvent("thinker", StageChunk(token_start=len(self.words), finish_reason="stop"))
        finally:
            self.running -= 1


@asynccontextmanager
async def playground(
    folder: Path, limits: Limits | None = None, *, speech: Path | None = None, **api: Any
) -> AsyncIterator[tuple[Tab, Storyteller]]:
    speaker = Storyteller(config_of(folder, limits, **api))
    with listening("127.0.0.1", 0) as listener:
        async with serving(speaker, listener) as server, tab(server.url, speech) as opened:
            yield opened, speaker


def sent(opened: Tab, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, opened.sent)
    return [event for event in events if event["type"] == kind]


async def test_text_is_shown_and_every_sample_is_played_in_order_without_a_gap(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.ask("Tell me a story.")
        await page.answered()
        assert (await page.texts("user"), await page.texts("answer")) == (["Tell me a story."], [SAID])
        np.testing.assert_array_equal(await page.recorded(), wave_of(0, Storyteller.sound_s))


@pytest.mark.full
async def test_what_a_model_writes_is_text(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, speaker):
        speaker.words = ("<img src=x onerror=alert(1)>", "<script>alert(1)</script>")
        await page.ask("Write me a page.")
        await page.answered()
        assert await page.texts("answer") == ["".join(speaker.words)]
        assert await page.page.locator(".answer img, .answer script").count() == 0


@pytest.mark.full
async def test_no_place_for_a_conversation_is_told_and_the_microphone_is_free(tmp_path: Path) -> None:
    async with playground(tmp_path, Limits(max_sessions=1)) as (page, _), talk(page.url):
        await page.page.get_by_role("button", name="Speak").click()
        await page.page.get_by_role("alert").get_by_text("sessions are open").wait_for()
        await page.until("microphones.every((each) => each.readyState === 'ended')")
        assert await page.page.get_by_role("button", name="Speak").get_attribute("aria-pressed") == "false"


@pytest.mark.full
async def test_the_timeline_has_what_the_page_saw_and_what_each_stage_said(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.ask("Tell me a story.")
        await page.answered()
        await page.page.locator(".times summary").click()
        rows = await page.page.locator(".times tbody th").all_text_contents()
        assert rows == ["Request", "thinker", "code2wav", "Text", "Sound", "Playing"]
        assert "first sound" in str(await page.page.locator(".times summary").text_content())


@pytest.mark.full
async def test_an_answer_is_played_again(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.ask("Tell me a story.")
        await page.answered()
        await page.page.get_by_role("button", name="Play again").click()
        await page.until("!document.getElementById('stop').hidden")
        await page.answered()
        sounding = await page.recorded()
        np.testing.assert_array_equal(sounding[sounding != 0], np.tile(wave_of(0, Storyteller.sound_s), 2))


@pytest.mark.full
@pytest.mark.parametrize("way", ["the button", "Escape"])
async def test_an_answer_is_stopped_in_all_stages(tmp_path: Path, way: str) -> None:
    async with playground(tmp_path) as (page, speaker):
        speaker.may_speak.clear()
        await page.ask("Tell me a story.")
        await page.page.get_by_text("said the sea.").wait_for()
        if way == "Escape":
            await page.page.keyboard.press("Escape")
        else:
            await page.page.get_by_role("button", name="Stop").click()
        await page.answered()
        await page.page.get_by_text("interrupted").wait_for()
        await page.ask("And now?")
        speaker.may_speak.set()
        await page.answered(2)
        assert speaker.running == 0 and len(speaker.begun) == 2
        np.testing.assert_array_equal(await page.recorded(), wave_of(1, Storyteller.sound_s))


@pytest.mark.full
async def test_the_next_message_interrupts_the_answer_that_sounds(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, speaker):
        speaker.sound_s = 60.0
        await page.ask("Tell me a long story.")
        await page.until("recorded.some((samples) => samples.some((sample) => sample !== 0))")
        speaker.sound_s = 1.0
        await page.ask("Something else.")
        await page.answered(2)
        sounding = await page.recorded()
        first, second = sounding[sounding > 0], sounding[sounding < 0]
        np.testing.assert_array_equal(first, wave_of(0, 60.0)[: len(first)])
        np.testing.assert_array_equal(second, wave_of(1, 1.0))
        assert 0 < len(first) < 60 * RATE_HZ


async def test_a_picture_that_is_dropped_is_shown_and_sent(tmp_path: Path) -> None:
    picture = png_bytes(question_picture())
    async with playground(tmp_path) as (page, _):
        await page.drop("disc.png", "image/png", picture)
        await page.page.get_by_role("listitem").get_by_text("disc.png").wait_for()
        async with page.page.expect_request("**/chat/completions") as asked:
            await page.ask("What is this?")
        content = json.loads((await asked.value).post_data or "")["messages"][0]["content"]
        assert content == [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}},
            {"type": "text", "text": "What is this?"},
        ]
        await page.answered()
        await page.page.get_by_role("img", name="disc.png").wait_for()


@pytest.mark.full
async def test_what_is_neither_picture_nor_sound_nor_film_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.drop("letter.txt", "text/plain", b"Dear sea,")
        await page.page.get_by_role("alert").get_by_text("letter.txt is no picture").wait_for()
        assert await page.page.get_by_role("listitem").count() == 0


@pytest.mark.full
async def test_what_is_told_while_the_page_connects_stays(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.page.get_by_text("preset:tiny").wait_for()
        told = asyncio.Event()

        async def once_it_is_told(route: Route) -> None:
            await told.wait()
            await route.continue_()

        await page.page.route("**/v1/models", once_it_is_told)
        await page.page.get_by_role("button", name="Key", exact=True).click()
        await page.page.evaluate("document.getElementById('model').textContent = ''")
        await page.page.get_by_role("button", name="Use this key").click()
        await page.drop("letter.txt", "text/plain", b"Dear sea,")
        refusal = page.page.get_by_role("alert").get_by_text("letter.txt is no picture")
        await refusal.wait_for()
        told.set()
        await page.page.get_by_text("preset:tiny").wait_for()
        assert await refusal.is_visible()


@pytest.mark.full
async def test_a_request_that_is_refused_says_why_and_the_message_may_be_changed(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, speaker):
        await page.drop("broken.png", "image/png", b"no picture")
        await page.ask("What is this?")
        await page.page.get_by_role("alert").get_by_text("image").wait_for()
        assert await page.page.get_by_label("Message", exact=True).input_value() == "What is this?"
        assert await page.page.locator("article").count() == 0 and speaker.begun == []
        page.complaints.clear()  # the browser's own line of a status that is an error


async def test_a_key_opens_the_api_and_stays_in_its_tab(tmp_path: Path) -> None:
    async with playground(tmp_path, requests_per_minute=1_000.0) as (page, _):
        await page.page.get_by_role("alert").get_by_text("API key").wait_for()
        page.complaints.clear()
        await page.page.get_by_label("API key", exact=True).fill(ONE)
        await page.page.get_by_role("button", name="Use this key").click()
        await page.page.get_by_text("preset:tiny").wait_for()
        await page.ask("Tell me a story.")
        await page.answered()
        assert await page.texts("answer") == [SAID]
        kept = await page.page.evaluate("[{...localStorage}, document.cookie, Object.values({...sessionStorage})]")
        assert kept == [{}, "", [ONE]]
        await page.page.get_by_role("button", name="Speak").click()  # the key is a subprotocol there
        await page.page.get_by_text("listening").wait_for()


@pytest.mark.full
async def test_speech_is_answered_and_interrupts_the_answer(tmp_path: Path) -> None:
    first, second = sentences()
    spoken = np.concatenate([silence(1.0), first, silence(3.0), second, silence(2.0)])
    speech = written(tmp_path / "speech.wav", spoken, RATE_HZ)
    async with playground(tmp_path, speech=speech) as (page, speaker):
        speaker.sound_s = 20.0
        await page.page.get_by_role("button", name="Speak").click()
        await page.page.get_by_text("interrupted").wait_for()
        await page.answered(2)
        sounding = await page.recorded()
        first, second = page.answers()
        played = np.split(sounding[sounding != 0], [np.count_nonzero(sounding) - len(second)])
        assert 0 < len(played[0]) < len(first)
        np.testing.assert_array_equal(played[0], first[: len(played[0])])
        np.testing.assert_array_equal(played[1], second)
        (truncated,) = sent(page, "conversation.item.truncate")
        assert 0 <= truncated["audio_end_ms"] <= len(played[0]) * 1000 // RATE_HZ
        await page.until(f"[...document.querySelectorAll('.user .text')].every((p) => p.textContent === {SAID!r})")
        assert len(await page.texts("user")) == 2
        await page.page.get_by_role("button", name="Speak").click()
        await page.until("document.getElementById('talk').getAttribute('aria-pressed') === 'false'")


@pytest.mark.full
async def test_a_typed_message_goes_into_the_conversation_by_voice_that_knows_the_former_one(tmp_path: Path) -> None:
    async with playground(tmp_path, speech=written(tmp_path / "silence.wav", silence(1.0), RATE_HZ)) as (page, _):
        await page.ask("Tell me a story.")
        await page.answered()
        await page.page.get_by_role("button", name="Speak").click()
        await page.page.get_by_text("listening").wait_for()
        await page.ask("Another one.")
        await page.answered(2)
        items = [event["item"] for event in sent(page, "conversation.item.create")]
        assert [(item["role"], item["content"][0]["text"]) for item in items] == [
            ("user", "Tell me a story."),
            ("assistant", SAID),
            ("user", "Another one."),
        ]
        sounding = await page.recorded()
        np.testing.assert_array_equal(sounding[sounding < 0], wave_of(1, Storyteller.sound_s))


@pytest.mark.full
async def test_axe_finds_nothing_serious_at_any_width_in_any_scheme(tmp_path: Path, pictures: Path) -> None:
    async with playground(tmp_path) as (page, _):
        for part in ("welcome", "conversation"):
            for scheme, (name, width) in itertools.product(("light", "dark"), WIDTHS.items()):
                await page.show(pictures, f"{part}-{name}-{scheme}", scheme=scheme, width=width)
                assert await page.faults() == [], (part, scheme, name)
            await page.drop("disc.png", "image/png", png_bytes(question_picture()))
            await page.ask("Tell me a story about this disc.")
            await page.answered()
            await page.page.locator(".times summary").last.click()


@pytest.mark.full
async def test_the_keyboard_reaches_all_that_can_be_done(tmp_path: Path) -> None:
    async with playground(tmp_path) as (page, _):
        await page.page.get_by_label("Message", exact=True).fill("Hello")
        reached = set()
        for _ in range(20):
            await page.page.keyboard.press("Tab")
            reached.add(await page.page.evaluate("document.activeElement.id"))
        assert {"voice", "access-button", "text", "attach", "talk", "send"} <= reached
