"""The toy that paints, by `OmniLLM` and the HTTP face: pictures are parts of answers like text and sound."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image
from toy.painter import SIDE, picture
from toy.tokenizer import END

from omni_cluster.engine.omni_llm import OmniLLM
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, OmniRequest, Prompt
from tests.server.local import LocalApp, local_app

CONFIG = Path(__file__).parent / "toy" / "painter.yaml"
CHAT = "/v1/chat/completions"
SAID = "Good morning"
PAINTED = picture([*SAID.encode(), END], seed=7)
BODY: dict[str, Any] = {
    "model": "preset:tiny",
    "messages": [{"role": "user", "content": SAID}],
    "modalities": ["text", "image"],
    "seed": 7,
}


@pytest.fixture(scope="module")
def painter() -> Iterator[OmniLLM]:
    omni = OmniLLM(CONFIG)
    try:
        yield omni
    finally:
        omni.shutdown()


@pytest.fixture(scope="module")
def app(painter: OmniLLM) -> Iterator[LocalApp]:
    with local_app(painter) as app:
        yield app


def image_part(png: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()}}


def test_an_answer_has_its_picture_as_a_png_file(painter: OmniLLM) -> None:
    (made,) = painter.generate([SAID], seed=7)
    assert (made.text, made.images, made.audio) == (SAID, (PAINTED,), None)
    with Image.open(io.BytesIO(made.images[0])) as opened:
        assert (opened.format, opened.size) == ("PNG", (SIDE, SIDE))


def test_a_picture_that_is_not_asked_for_is_not_made(painter: OmniLLM) -> None:
    (made,) = painter.generate([SAID], modalities=["text"])
    assert (made.text, made.images, list(made.times)) == (SAID, (), ["text"])


def test_sound_is_refused_where_pictures_are_made(painter: OmniLLM) -> None:
    with pytest.raises(RequestError, match=r'modalities is \["text", "audio"\], but no stage here makes sound, use'):
        painter.generate([SAID], modalities=["text", "audio"])


def test_a_picture_is_a_part_of_a_message(app: LocalApp) -> None:
    answer = app.client.post(CHAT, json=BODY).json()
    assert answer["choices"][0]["message"]["content"] == [{"type": "text", "text": SAID}, image_part(PAINTED)]
    alone = app.client.post(CHAT, json=BODY | {"modalities": ["text"]}).json()
    assert alone["choices"][0]["message"]["content"] == SAID


def test_a_picture_is_streamed_as_a_delta_of_its_own(app: LocalApp) -> None:
    with app.client.stream("POST", CHAT, json=BODY | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    by_modality = {
        kind: [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk.get("modality") == kind]
        for kind in ("text", "image")
    }
    assert "".join(by_modality["text"]) == SAID and by_modality["image"] == [[image_part(PAINTED)]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_openais_client_reads_pictures_of_each_choice(app: LocalApp) -> None:
    client = OpenAI(base_url=f"{app.url}/v1", api_key="none")
    made = client.chat.completions.create(**BODY, n=2)
    parts = [choice.message.content[1] for choice in made.choices]
    assert parts == [image_part(picture([*SAID.encode(), END], seed)) for seed in (7, 8)]


def test_a_picture_given_back_is_refused_and_its_text_is_not(app: LocalApp) -> None:
    content = app.client.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"]
    for count, status in ((1, 200), (2, 400)):
        said = [*BODY["messages"], {"role": "assistant", "content": content[:count]}, *BODY["messages"]]
        answer = app.client.post(CHAT, json=BODY | {"messages": said})
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "messages[1].content[1]"


@pytest.mark.parametrize(
    ("known", "painted"),
    [
        ({}, (PAINTED,)),
        ({"text": KnownOutput((*SAID[:4].encode(),))}, (PAINTED,)),
        ({"text": KnownOutput((*SAID.encode(), END), "stop")}, (PAINTED,)),
        ({"text": KnownOutput((*SAID.encode(), END), "stop"), "picture": KnownOutput(num_images=1)}, ()),
    ],
    ids=["nothing", "some text", "all text", "the picture"],
)
def test_a_request_that_is_begun_again_has_its_picture_once(
    painter: OmniLLM, known: dict[str, KnownOutput], painted: tuple[bytes, ...]
) -> None:
    request = OmniRequest("again", Prompt(SAID), seed=7, wants_audio=False, wants_images=True, known=known)
    made = painter._run(painter._async.generate(request))
    assert (made.images, made.finish_reason) == (painted, "stop")
