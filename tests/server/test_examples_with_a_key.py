"""Examples that ask a server with keys: from the shell, in Python, and as a page that comes from another origin."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from omni_cluster.config.access import ApiConfig
from omni_cluster.engine.omni_llm import OmniLLM
from tests.browser import RATE_HZ, Tab, is_of, tab, written
from tests.example_folders import AUDIBLE, EXAMPLES, SPEECH, ran, started
from tests.server.keyed import ONE, OTHER
from tests.server.local import LocalApp, local_app
from tests.server.realtime.spoken import sentences, silence

pytestmark = pytest.mark.full

CODES = 400
"""Of an answer: 8 s, so that there is time to interrupt it."""


@pytest.fixture(scope="module")
async def page_url() -> AsyncIterator[str]:
    """Served as its README has it, but for the port."""
    folder = EXAMPLES / "realtime_browser"
    command = (sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", folder)
    async with started(*command, folder=folder) as server:
        (port,) = re.findall(r"port (\d+)", await server.line())
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def local(omni: OmniLLM, page_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    """With long answers for the page, and for none without a key."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"{ONE}\n{OTHER}\n")
    with local_app(omni, api=ApiConfig(keys_file=str(keys), cors_origins=[page_url]), codes=CODES) as app:
        yield app


async def test_a_script_of_curl_sends_the_key(local: LocalApp, tmp_path: Path) -> None:
    chat, where = EXAMPLES / "curl" / "chat.sh", {"folder": tmp_path, "BASE_URL": local.url}
    assert json.loads(await ran(chat, **where, API_KEY=ONE))["choices"][0]["message"]["content"]
    async with started(chat, **where) as program:
        status, out, _ = await program.ended()
    assert status != 0 and json.loads(out)["error"]["code"] == "invalid_api_key"


async def test_a_talk_sends_the_key(local: LocalApp, tmp_path: Path) -> None:
    talk = (sys.executable, EXAMPLES / "realtime_python" / "talk.py", SPEECH)
    assert (await ran(*talk, folder=tmp_path, BASE_URL=local.url, API_KEY=ONE)).strip()
    async with started(*talk, folder=tmp_path, BASE_URL=local.url) as program:
        status, _, err = await program.ended()
    assert (status, err) == (1, "server rejected WebSocket connection: HTTP 401\n")


@asynccontextmanager
async def opened(page_url: str, server: LocalApp, key: str, speech: Path | None = None) -> AsyncIterator[Tab]:
    async with tab(page_url, speech, repeats=True, server=server.url) as page:
        await page.page.get_by_label("Server").fill(server.url)
        await page.page.get_by_label("Key").fill(key)
        await page.page.get_by_role("button", name="Start").click()
        yield page


async def test_it_speaks_and_plays_and_interrupts(
    page_url: str, local: LocalApp, tmp_path: Path, pictures: Path
) -> None:
    speech = np.concatenate([silence(0.5), sentences()[0], silence(2.0)])
    async with opened(page_url, local, ONE, written(tmp_path / "speech.wav", speech, RATE_HZ)) as page:
        await page.page.get_by_text("[interrupted]").wait_for()
        await page.mute(True)
        await page.page.get_by_text("Listening.").wait_for()
        played = await page.recorded()
        await page.show(pictures, "example")
        assert await page.faults() == []
        first, second = page.answers()
        (truncate,) = [event for event in map(json.loads, page.sent) if event["type"] == "conversation.item.truncate"]
        cut = truncate["audio_end_ms"] * RATE_HZ // 1000
        assert is_of(played[played != 0], [first, second]) and np.abs(played.astype(int)).max() > AUDIBLE
        sounding = [np.count_nonzero(each) for each in (played, first[:cut], second)]
        assert 0 <= sounding[0] - sounding[1] - sounding[2] < RATE_HZ // 1000
        log = await page.page.locator("#log").text_content()
        assert log == "".join(f"\n{text}{end}" for text, end in zip(texts(page), (" [interrupted]", ""), strict=True))
        await page.page.get_by_role("button", name="Stop").click()
        await page.page.get_by_text("Closed").wait_for()
        await page.until("microphones.every((each) => each.readyState === 'ended')")


def texts(page: Tab) -> list[str]:
    """What the server wrote of each answer."""
    written: dict[str, str] = {}
    for event in map(json.loads, page.told):
        if event["type"] == "response.output_audio_transcript.delta":
            written[event["response_id"]] = written.get(event["response_id"], "") + event["delta"]
    return list(written.values())


async def test_a_page_of_another_origin_is_told_so(page_url: str, local: LocalApp) -> None:
    async with opened(page_url.replace("127.0.0.1", "localhost"), local, ONE) as page:
        await page.page.get_by_text("Closed: origin_not_allowed.").wait_for()


async def test_without_a_key_it_is_closed(page_url: str, local: LocalApp) -> None:
    async with opened(page_url, local, "") as page:
        await page.page.get_by_text("Closed").wait_for()
        page.complaints.clear()  # the browser's own line of a connection that is refused
