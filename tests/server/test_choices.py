"""Several answers to one request, over a pipeline that needs no engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from omni_cluster.server.endpoints.chat import choices_of
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.sampling import BOUNDS
from tests.configs import TINY_CONFIG
from tests.engine.stages import until
from tests.server.speaker import CHAT, face_of

CONFIG = load_config(TINY_CONFIG, known_families=known_families())
SOUND = {"voice": "Ethan", "format": "pcm16"}


def test_each_choice_has_seeds_and_an_id_of_its_own() -> None:
    most = int(BOUNDS["seed"].most)
    request = OmniRequest("r", "p", sampling={"thinker": {"seed": most}, "talker": {"top_k": 3}}, seed=7)
    first, *others = choices_of(request, 3)
    assert first is request and len({first.request_id, *(other.request_id for other in others)}) == 3
    assert [other.seed for other in others] == [8, 9]
    seeds = [int(other.sampling["thinker"]["seed"]) for other in others]
    assert seeds == [-(2**63), -(2**63) + 1] and all(map(BOUNDS["seed"].hold, seeds))
    assert all(other.sampling["talker"] == {"top_k": 3} for other in others)


async def test_whole_answers_and_their_one_place() -> None:
    async with face_of(CONFIG) as face:
        body = (await face.chat(n=3, audio=SOUND)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert all(len(choice["message"]["audio"]["data"]) == 64_000 for choice in body["choices"])
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 3)
        assert len(face.speaker.begun) == 3 and face.server.admission.slots.taken == 0


async def test_a_stream_of_all() -> None:
    async with face_of(CONFIG) as face:
        answer = await face.chat(n=3, audio=SOUND, stream=True, stream_options={"include_usage": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and not face.speaker.running
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["usage"]["completion_tokens"] == 3 and events[-1]["choices"] == []
    choices = [event["choices"][0] for event in events[:-1]]
    assert Counter(c["index"] for c in choices if c["finish_reason"]) == Counter(range(3))
    for index in range(3):
        audio = [c["delta"]["audio"] for c in choices if c["index"] == index and "audio" in c["delta"]]
        assert [each["id"] for each in audio if "id" in each] == [audio[0]["id"]] and audio[0]["voice"] == "Ethan"
        assert sum(len(each.get("data", "")) for each in audio) == 64_000


@pytest.mark.parametrize("stream", [False, True])
async def test_all_end_with_the_request_s_time(stream: bool) -> None:
    async with face_of(CONFIG) as face:
        face.speaker.may_speak.clear()
        body = {"model": CONFIG.model, "messages": [{"role": "user", "content": "Hi"}], "n": 4, "stream": stream}
        answer = await face.client.post(CHAT, json=body, headers={"x-request-timeout-seconds": "3"})
        assert "deadline_exceeded" in answer.text and len(face.speaker.begun) == 4

        async def nothing_runs() -> bool:
            return face.speaker.running == 0 == face.server.admission.slots.taken

        await until(nothing_runs)


async def test_more_than_are_accepted_begin_nothing() -> None:
    async with face_of(CONFIG) as face:
        refused = await face.chat(n=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert not face.speaker.begun
