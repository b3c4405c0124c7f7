"""Speech of text that comes in pieces, over a pipeline whose sound says which text it speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from omni_cluster.config.limits import Limits
from omni_cluster.engine.exposition import ReplicaMetrics, text_of
from omni_cluster.openai_api.speech import MAX_INPUT_CHARS
from omni_cluster.server import speech_session
from omni_cluster.server.speech_parts import MOST_PIECES
from tests.server.keyed import ONE
from tests.server.samples import Totals, totals
from tests.server.speech.reciter import PATH, PATIENCE_S, Stage, Teller, stage, telling

pytestmark = pytest.mark.usefixtures("tiny")


async def posted(there: Stage, text: str, **fields: Any) -> bytes:
    """The sound of the same text by a request of its own."""
    body = {"model": there.reciter.bound.config.model, "input": text, "response_format": "wav", **fields}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"{there.url}/v1/audio/speech", json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def counted(there: Stage) -> Totals:
    return totals(text_of(ReplicaMetrics.of(there.http.metrics.registry, "i1").metrics).decode())


async def test_each_sentence_is_spoken_as_by_a_request_of_its_own_and_in_its_order(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, telling(there.url, voice="ethan") as client:
        await client.tell("Good mor", "ning. How ", "are you? I am")
        first, second = await client.sentence(), await client.sentence()
        third, *others = await client.text()
        assert not others
        for index, (heard, text) in enumerate([(first, "Good morning."), (second, "How are you?"), (third, "I am")]):
            place = {"utterance_index": 0, "sentence_index": index}
            sound = {"format": "wav", "sample_rate": 24_000, "channels": 1}
            assert heard.start == {"type": "audio.start", **place, "sentence_text": text, **sound}
            ended = {"total_bytes": len(heard.sound), "error": False, "finish_reason": "stop"}
            assert heard.done == {"type": "audio.done", **place, **ended}
            assert len(heard.frames) == 1 and heard.sound == await posted(there, text, voice="Ethan")
        assert first.sound != await posted(there, "Good morning.", voice="Chelsie")


async def test_a_session_speaks_several_texts_each_with_settings_of_its_own(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, telling(there.url) as client:
        await client.tell("One. ")
        (first,) = await client.text()
        await client.send("session.config", response_format="pcm", stream_audio=True, split_granularity="none")
        await client.tell("Two words. ", "And more.")
        (second,) = await client.text()
        assert (first.start["format"], second.start["format"]) == ("wav", "pcm")
        assert second.start["sentence_text"] == "Two words. And more." and second.start["utterance_index"] == 1
        assert len(second.frames) == 4
        assert second.sound == await posted(there, "Two words. And more.", response_format="pcm", stream=True)
        assert await client.text() == []
        await client.tell("Last, ")
        await client.send("session.close")
        assert (await client.sentence()).start["sentence_text"] == "Last,"
        assert (await client.next())["type"] == "session.done"
        assert await client.closed() == 1000


async def test_the_next_sentence_is_made_while_one_is_sent_and_no_more_are(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, telling(there.url) as client:
        first, second = there.reciter.hold("One."), there.reciter.hold("Two.")
        await client.tell("One. Two. Three. Four. ")
        await until(lambda: there.reciter.running == 2)
        assert (await client.next())["sentence_text"] == "One."
        assert sorted(there.reciter.texts) == ["One.", "Two."]
        second.set()
        await until(lambda: there.reciter.running == 1)
        assert sorted(there.reciter.texts) == ["One.", "Two."]
        first.set()
        assert isinstance(await client.next(), bytes) and (await client.next())["type"] == "audio.done"
        said = [(await client.sentence()).start["sentence_text"] for _ in range(3)]
        assert said == ["Two.", "Three.", "Four."] and sorted(there.reciter.texts[2:]) == ["Four.", "Three."]


async def test_a_client_that_leaves_in_the_midst_ends_its_requests(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        there.reciter.hold("One.")
        there.reciter.hold("Two.")
        async with telling(there.url) as client:
            await client.tell("One. Two. Three. ")
            await until(lambda: there.reciter.running == 2)
        await until(lambda: there.reciter.running == 0 and not counted(there)["ingress_sessions",])
        assert sorted(there.reciter.texts) == ["One.", "Two."]
        await until(lambda: counted(there)["ingress_requests_total", PATH, "499"] == 2)


async def test_a_sentence_that_breaks_is_said_in_its_place_and_the_next_one_is_spoken(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, telling(there.url, response_format="pcm", stream_audio=True) as client:
        await client.tell("It is broken \nbroken .\nWell. ")
        half, none, whole = [await client.sentence() for _ in range(3)]
        assert [(each.done["error"], bool(each.sound)) for each in (half, none, whole)] == [
            (True, True),
            (True, False),
            (False, True),
        ]
        assert half.errors[0]["code"] == none.errors[0]["code"] == "stage_died"
        assert half.errors[0]["partial_audio"] and "partial_audio" not in none.errors[0]
        assert half.errors[0]["sentence_index"] == 0 and not whole.errors
        assert counted(there)["ingress_requests_total", PATH, "503"] == 2
        assert counted(there)["ingress_requests_total", PATH, "200"] == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"voice": "Bob"}, 'voice is "Bob", but the voices are Chelsie, Ethan.'),
        ({"response_format": "mp4"}, 'response_format is "mp4", but it should be'),
        ({"model": "other"}, 'The model "other" does not exist; use one of'),
        ({"split_granularity": "word"}, 'split_granularity is "word", but it should be'),
        ({"stream_audio": "yes"}, 'stream_audio is "yes", but it should be'),
        ({"input": "Hi."}, 'input is "Hi.", which is not supported in session.config; use input.text.'),
        ({"ref_audio": "data:"}, "the voices are the model's own"),
        ({"word_timestamps": True}, "word_timestamps is true, which is not supported; leave it out"),
    ],
)
async def test_settings_that_are_none_end_the_session(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    async with stage(tmp_path) as there, telling(there.url, **config) as client:
        assert words in (await client.refused())["message"]
        assert await client.closed() == 1008


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("{", "The event is not a JSON object; send one with a type."),
        ('{"type": "input.tex"}', 'type is "input.tex", but the events of a client are session.config, input.text'),
        ('{"type": "input.text"}', "text is required."),
        ('{"type": "input.text", "text": 1}', "text is 1, but it should be a valid string."),
        (json.dumps({"type": "input.text", "text": "a" * 140_000}), "but at most 131072 are accepted."),
        ('{"type": "session.config", "voice": "Bob"}', 'voice is "Bob"'),
    ],
)
async def test_what_is_wrong_with_an_event_is_said_and_the_session_goes_on(
    tmp_path: Path, event: str, words: str
) -> None:
    async with stage(tmp_path) as there, telling(there.url, voice="Ethan") as client:
        await client.socket.send(event)
        assert words in (await client.refused())["message"]
        await client.tell("Hello")
        (heard,) = await client.text()
        assert heard.sound == await posted(there, "Hello", voice="Ethan")


async def test_text_comes_after_the_settings_and_these_not_within_a_text(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, telling(there.url) as client:
        await client.tell("Hello")
        await client.send("session.config", voice="Ethan")
        assert "came within a text; send input.done" in (await client.refused())["message"]
        (heard,) = await client.text()
        assert heard.sound == await posted(there, "Hello")
        async with telling(there.url, voice="Bob") as other:
            await other.refused()
            assert await other.closed() == 1008


async def test_text_that_comes_first_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path) as there, connect(there.url.replace("http", "ws") + PATH) as socket:
        await socket.send('{"type": "input.text", "text": "Hi."}')
        assert "send that first" in json.loads(await socket.recv())["message"]
        await asyncio.wait_for(socket.wait_closed(), PATIENCE_S)
        assert socket.close_code == 1008


@pytest.mark.parametrize("granularity", ["sentence", "none"])
async def test_text_without_an_end_is_bounded(tmp_path: Path, granularity: str) -> None:
    async with stage(tmp_path) as there, telling(there.url, split_granularity=granularity) as client:
        await client.tell("a" * MAX_INPUT_CHARS, "b")
        refused = await client.refused()
        assert refused["message"].startswith(f"{MAX_INPUT_CHARS + 1} characters came without an end of a sentence")
        assert refused["code"] == "text_too_long" and await client.closed() == 1008


async def test_text_that_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_session, "MOST_WAITING_CHARS", 100)
    async with stage(tmp_path) as there, telling(there.url) as client:
        there.reciter.hold("One.")
        await client.tell("One. ", "Twelve chars. " * 10)
        assert (await client.next())["type"] == "audio.start"
        refused = await client.refused()
        assert "characters wait to be spoken, but at most 100 may" in refused["message"]
        assert await client.closed() == 1008
        await until(lambda: there.reciter.running == 0)


async def test_a_client_that_says_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path) as there:
        monkeypatch.setattr(speech_session, "CONFIG_S", 0.2)
        async with connect(there.url.replace("http", "ws") + PATH) as socket:
            refused = json.loads(await asyncio.wait_for(socket.recv(), PATIENCE_S))
            assert (refused["code"], "session.config" in refused["message"]) == ("session_idle", True)
        monkeypatch.setattr(speech_session, "CONFIG_S", PATIENCE_S)
        async with telling(there.url) as client:
            may_end = there.reciter.hold("One.")
            await client.tell("One. ")
            assert (await client.next())["type"] == "audio.start"
            monkeypatch.setattr(speech_session, "IDLE_S", 0.3)
            await client.tell("")  # from this event on
            await asyncio.sleep(1)  # while a text is spoken a client may say nothing
            may_end.set()
            assert isinstance(await client.next(), bytes) and (await client.next())["type"] == "audio.done"
            refused = await client.refused()
            assert refused["message"] == "Nothing came for 0.3 s; text should come, or session.close within that."
            assert await client.closed() == 1008


async def test_a_client_that_reads_nothing_keeps_the_stages_waiting(tmp_path: Path) -> None:
    """At the socket of the application, which may take no message for as long as its client reads none."""
    async with stage(tmp_path) as there:
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        may_send = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "websocket.send":
                await may_send.wait()

        config = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
        text = {"type": "input.text", "text": f"{'a ' * 1000}.\n{'b ' * 1000}.\n{'c ' * 1000}.\n"}
        sent.put_nowait({"type": "websocket.connect"})
        for event in (config, text):
            sent.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})
        scope = {"type": "websocket", "path": PATH, "query_string": b"", "headers": [], "subprotocols": []}
        served = asyncio.ensure_future(there.http.app()(scope, sent.get, send))  # type: ignore[arg-type]
        made = there.reciter.made
        await until(lambda: len(made) == 2 and min(made.values()) > MOST_PIECES)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(made) == 2 and max(made.values()) <= MOST_PIECES + 2
        sent.put_nowait({"type": "websocket.disconnect", "code": 1001})
        may_send.set()
        await asyncio.wait_for(served, PATIENCE_S)
        assert there.reciter.running == 0 and len(made) == 2


async def test_sessions_and_their_sentences_are_counted_and_limited(tmp_path: Path) -> None:
    limits = Limits(max_sessions=1, max_ongoing_requests=1, max_queued_requests=1)
    headers = {"Authorization": f"Bearer {ONE}"}
    async with stage(tmp_path, limits, requests_per_minute=2.0) as there:
        with pytest.raises(InvalidStatus) as refused:
            async with telling(there.url):
                pass
        assert refused.value.response.status_code == 401
        before = counted(there)["ingress_sent_bytes_total", PATH]
        async with telling(there.url, headers) as client:
            await client.tell("One. Two. Three. ")
            said = [await client.sentence() for _ in range(3)]
            assert [each.done["error"] for each in said] == [False, False, True]
            assert said[2].errors[0]["code"] == "rate_limit_exceeded"
            assert counted(there)["ingress_sessions",] == 1
            async with connect(there.url.replace("http", "ws") + PATH, additional_headers=headers) as socket:
                assert json.loads(await socket.recv())["code"] == "too_many_sessions"
                assert await Teller(socket).closed() == 1013
        assert counted(there)["ingress_requests_total", PATH, "200"] == 2
        assert counted(there)["ingress_refusals_total", PATH, "rate_limit_exceeded"] == 1
        assert counted(there)["ingress_sent_bytes_total", PATH] - before == sum(len(each.sound) for each in said)


async def test_a_session_ends_with_its_time_and_with_the_server(tmp_path: Path) -> None:
    async with stage(tmp_path, Limits(max_session_s=0.5)) as there, telling(there.url) as client:
        assert (await client.refused())["code"] == "session_expired"
        assert await client.closed() == 1001
    async with stage(tmp_path) as there, telling(there.url) as client:
        may_end = there.reciter.hold("One.")
        await client.tell("One. ")
        assert (await client.next())["type"] == "audio.start"
        closing = asyncio.ensure_future(there.http.let_all_end())
        await client.tell("Two. ")
        may_end.set()
        assert isinstance(await client.next(), bytes) and (await client.next())["type"] == "audio.done"
        assert (await client.sentence()).errors[0]["code"] == "server_closing"
        assert (await client.refused())["code"] == "server_closing" and await client.closed() == 1001
        await closing
