"""LoRA adapters of the thinker: each request has the answer of its own one, beside any other request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
import pytest_asyncio

from omni_cluster.engine.omni_llm import AsyncOmniLLM
from omni_cluster.models.lora import read_adapters
from omni_cluster.models.qwen2_5_omni.stages import Thinker
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import AdapterError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import OmniRequestOutput
from omni_cluster.types.rows import PrefixHashes
from omni_cluster.vllm_engine.held_prefixes import PrefixHold
from omni_cluster.vllm_engine.kept_rows import LEAST_LEFT_OUT
from omni_cluster.vllm_engine.lora import load
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.adapters import merged, write_adapter
from tests.engine.stages import (
    MAX_TOKENS,
    THINKER_STEP_TOKENS,
    begun_at_once,
    pipeline_config,
    request,
    running,
    thinker_stage,
    tight,
    until_free,
)
from tests.engine.thinking import assert_equal, think
from tests.reference import Reference, SpeechReference, ThinkerReference, media, prompt_text
from tests.server.local import _server

pytestmark = [pytest.mark.parity, pytest.mark.full]

NAMES = ("", "a", "b")
"""The checkpoint alone, and its adapters."""
LONG = "No other prompt begins with this. " * 25


@dataclass
class Adapted:
    """The adapters, and transformers with each of them in its weights."""

    folders: dict[str, str]
    references: dict[str, Reference]

    def thinker(self, name: str, kind: str) -> ThinkerReference:
        return self.references[name].thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def adapted(tiny: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapters")
    # Unlike in rank, in what they change and in whose names they have.
    a = write_adapter(folder / "a", tiny, seed=1, rank=4)
    b = write_adapter(folder / "b", tiny, seed=2, rank=9, projections=("q_proj", "down_proj"), whole_model=False)
    references = {
        name: Reference(merged(path, tiny, folder / f"of-{path.name}")) for name, path in (("a", a), ("b", b))
    }
    return Adapted({"a": str(a), "b": str(b)}, {"": reference, **references})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speaking(forked_engines: None, adapted: Adapted) -> AsyncIterator[AsyncOmniLLM]:
    thinker = thinker_stage().model_copy(update={"lora_adapters": adapted.folders})
    omni = AsyncOmniLLM(pipeline_config(thinker))
    await omni.start()
    yield omni
    await omni.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def thinker(forked_engines: None, adapted: Adapted) -> AsyncIterator[Stage]:
    """Its steps have one adapter at a time, and prompts take several of them."""
    stage = thinker_stage(**tight(THINKER_STEP_TOKENS), max_loras=1)
    config = pipeline_config(stage.model_copy(update={"lora_adapters": adapted.folders}))
    async with running(config, "thinker") as started:
        yield started


def test_each_adapter_has_an_answer_of_its_own(adapted: Adapted) -> None:
    answers = [adapted.thinker(name, "text") for name in NAMES]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(NAMES)
    assert min(answer.min_margin for answer in answers) > 1e-3


@pytest.mark.parametrize("kind", ["text", "audio+image"])
@pytest.mark.parametrize("name", NAMES)
async def test_tokens_and_rows_are_those_of_merged_weights(
    thinker: Stage, adapted: Adapted, name: str, kind: str
) -> None:
    wanted = adapted.thinker(name, kind)
    assert kind == "text" or len(wanted.prompt_ids) > THINKER_STEP_TOKENS
    uncached = {"thinker": {"skip_reading_prefix_cache": True}}
    assert_equal(await think(thinker, request(f"alone-{name}-{kind}", kind, adapter=name, sampling=uncached)), wanted)


async def test_more_adapters_than_a_step_may_have_take_turns(thinker: Stage, adapted: Adapted) -> None:
    asked = [request(f"turn-{number}", "audio", adapter=NAMES[number % 3]) for number in range(6)]
    made = await begun_at_once(thinker, [think(thinker, each) for each in asked])
    for each, answer in zip(asked, made, strict=True):
        assert_equal(answer, adapted.thinker(each.adapter, "audio"))
    await until_free(thinker)


async def test_adapters_beside_each_other_in_a_batch(speaking: AsyncOmniLLM, adapted: Adapted) -> None:
    thinker = cast(Stage, speaking._stages["thinker"])
    asked = [request(f"beside-{number}", "image", adapter=NAMES[number % 3]) for number in range(6)]
    before = (await thinker.counts())["steps"]
    made = await begun_at_once(thinker, [think(thinker, each) for each in asked])
    assert (await thinker.counts())["steps"] - before < 2 * MAX_TOKENS + len(asked)  # six at once, not in turns
    for each, answer in zip(asked, made, strict=True):
        assert_equal(answer, adapted.thinker(each.adapter, "image"))


async def test_a_cached_prompt_is_its_adapter_s_alone(thinker: Stage, adapted: Adapted) -> None:
    """Neither keys and values nor rows of one are taken for another."""
    cached = []
    for turn, name in enumerate(("", "a", "b", "", "a", "b")):
        await until_free(thinker)
        # Words of this test: no other one has left blocks of them.
        prompt = prompt_text("text", "Which of you says that? " * 5)
        made = await think(thinker, OmniRequest(f"cached-{turn}", prompt, adapter=name))
        assert_equal(made, adapted.references[name].thinker(prompt, max_new_tokens=MAX_TOKENS))
        cached.append(made.cached_tokens)
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) > 0


async def test_what_the_talker_made_of_a_prompt_is_its_adapter_s_alone(
    speaking: AsyncOmniLLM, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    async def positions(self: PrefixHold, prefix: PrefixHashes) -> int:
        held.append(await ask(self, prefix))
        return held[-1]

    ask = PrefixHold.positions
    monkeypatch.setattr(PrefixHold, "positions", positions)
    prompt, asked = prompt_text("text", LONG), []
    for turn, name in enumerate(("", "a", "b", "", "a", "b")):
        before = len(held)
        made = await speaking.generate(OmniRequest(f"spoken-{turn}", prompt, adapter=name))
        assert_spoken(made, adapted.references[name].speech(prompt))
        asked.append(held[before:])
    assert asked[:3] == [[], [], []]  # nothing of them had gone out
    assert all(len(each) == 1 and each[0] >= LEAST_LEFT_OUT for each in asked[3:])


def assert_spoken(made: OmniRequestOutput, wanted: SpeechReference) -> None:
    assert list(made.token_ids) == wanted.token_ids
    assert made.codes is not None and list(made.codes.first_values) == wanted.codes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [1, MAX_TOKENS // 2, MAX_TOKENS - 1])
async def test_a_request_that_is_begun_again_goes_on_with_its_adapter(
    speaking: AsyncOmniLLM, adapted: Adapted, name: str, cut: int
) -> None:
    wanted = adapted.thinker(name, "audio")
    known = {"thinker": KnownOutput(tuple(wanted.token_ids[:cut]))}
    asked = request(f"again-{name}-{cut}", "audio", adapter=name, known=known)
    assert_equal(await think(cast(Stage, speaking._stages["thinker"]), asked), wanted)


async def test_an_adapter_that_vllm_cannot_read_is_refused_and_the_engine_goes_on(
    thinker: Stage, adapted: Adapted, tmp_path: Path
) -> None:
    stage = cast(StageLLM, thinker)
    adapter = read_adapters(stage._stage, Thinker.lora_prefixes)[0]
    with pytest.raises(AdapterError, match=r"lora_adapters\.a is '.*gone', which vLLM refuses: \S.*\.$"):
        await load(stage.llm, [replace(adapter, folder=tmp_path / "gone")] * 9)
    assert_equal(await think(thinker, request("after", adapter="a")), adapted.thinker("a", "text"))


# ------------------------------------------------------------ through HTTP


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(speaking: AsyncOmniLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with _server(speaking) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        yield client


QUESTION = "Hello world, describe it."


async def test_clients_choose_by_model(client: httpx.AsyncClient, speaking: AsyncOmniLLM, adapted: Adapted) -> None:
    said: dict[str, tuple[str, ...]] = {}
    tokenizer = adapted.references[""].processor.tokenizer
    for name, model in (("", "preset:tiny"), ("a", "a"), ("b", "b")):
        message = {"role": "user", "content": QUESTION}
        rendered = str(
            speaking.bound.family.render(({"role": "user", "content": [{"type": "text", "text": QUESTION}]},), ())
        )
        bodies = {
            "chat/completions": {"messages": [message], "modalities": ["text"]},
            "responses": {"input": QUESTION},
            "completions": {"prompt": QUESTION, "max_tokens": MAX_TOKENS},
        }
        answers = await asyncio.gather(
            *(client.post(f"/v1/{path}", json={"model": model, **body}) for path, body in bodies.items())
        )
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        chat, response, completion = (answer.json() for answer in answers)
        assert {each["model"] for each in (chat, response, completion)} == {model}
        texts = (
            chat["choices"][0]["message"]["content"],
            response["output"][0]["content"][0]["text"],
            completion["choices"][0]["text"],
        )
        for text, prompt in zip(texts, (rendered, rendered, QUESTION), strict=True):
            wanted = adapted.references[name].thinker(prompt, max_new_tokens=MAX_TOKENS)
            # A character that is cut off by the limit is not said.
            assert text == tokenizer.decode(wanted.token_ids, skip_special_tokens=True).rstrip("\ufffd")
        said[name] = texts
    assert len({texts for texts in said.values()}) == 3


async def test_speech_is_of_the_adapter_that_is_named(client: httpx.AsyncClient, adapted: Adapted) -> None:
    body = {"input": "Hello there, my friend.", "response_format": "pcm", "seed": 1}
    heard = {
        m: (await client.post("/v1/audio/speech", json={"model": m, **body})).content for m in ("preset:tiny", "a")
    }
    again = (await client.post("/v1/audio/speech", json=body)).content
    assert again == heard["preset:tiny"] != heard["a"]
    assert all(np.frombuffer(each, np.int16).any() for each in heard.values())
