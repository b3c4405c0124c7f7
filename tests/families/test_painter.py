"""The toy that paints, by `OmniLLM` and the HTTP face: pictures are parts of answers like text and sound."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from PIL import Image
from toy.painter import SIDE, picture
from toy.tokenizer import END

from omni_cluster.engine.omni_llm import OmniLLM
from omni_cluster.types.errors import RequestError
from omni_cluster.types.inputs import KnownOutput, OmniRequest, Prompt
from tests.families.painted import BODY, CHAT, SAID, image_part, png_of
from tests.server.local import LocalApp, local_app

CONFIG = Path(__file__).parent / "toy" / "painter.yaml"
SAYS = [*SAID.encode(), END]
PAINTED = picture(SAYS, BODY["seed"])


@pytest.fixture(scope="module")
def painter() -> Iterator[OmniLLM]:
    with OmniLLM(CONFIG) as omni:
        yield omni


@pytest.fixture(scope="module")
def app(painter: OmniLLM) -> Iterator[LocalApp]:
    with local_app(painter) as app:
        yield app


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


def test_a_picture_is_a_part_of_a_message_whole_and_streamed(app: LocalApp) -> None:
    assert png_of(app.client) == PAINTED


def test_content_is_a_string_unless_pictures_are_asked_for(app: LocalApp) -> None:
    alone = app.client.post(CHAT, json=BODY | {"modalities": ["text"]}).json()
    assert alone["choices"][0]["message"]["content"] == SAID


def test_openais_client_reads_pictures_of_each_choice(app: LocalApp) -> None:
    client = OpenAI(base_url=f"{app.url}/v1", api_key="none")
    made = client.chat.completions.create(**BODY, n=2)
    parts = [choice.message.content[1] for choice in made.choices]
    assert parts == [image_part(picture(SAYS, seed)) for seed in (7, 8)]


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
        ({"text": KnownOutput(tuple(SAYS), "stop")}, (PAINTED,)),
        ({"text": KnownOutput(tuple(SAYS), "stop"), "picture": KnownOutput(num_images=1)}, ()),
    ],
    ids=["nothing", "some text", "all text", "the picture"],
)
def test_a_request_that_is_begun_again_has_its_picture_once(
    painter: OmniLLM, known: dict[str, KnownOutput], painted: tuple[bytes, ...]
) -> None:
    request = OmniRequest("again", Prompt(SAID), seed=7, wants_audio=False, wants_images=True, known=known)
    made = painter._run(painter._async.generate(request))
    assert (made.images, made.finish_reason) == (painted, "stop")
