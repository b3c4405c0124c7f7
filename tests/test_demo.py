from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from rich.console import Console

from omni_cluster.demo import (
    PICTURE_QUESTION,
    SPOKEN_QUESTION,
    DemoError,
    ask,
    converse,
    first_model,
    made_folder,
    picture_body,
    png_bytes,
    question_picture,
    show,
    spoken_body,
    written_down,
)
from omni_cluster.openai_api import sse
from omni_cluster.openai_api.audio import Base64Pieces, pcm16, wav_file
from omni_cluster.openai_api.chat import ChatRequest, check_chat_request, open_chat_request
from omni_cluster.openai_api.completion import ChatStream
from omni_cluster.openai_api.errors import error_body
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.video import VideoLimits

MODEL = "tiny"
LISTED = {"id": MODEL, "object": "model", "sound": {"sample_rate_hz": 24_000, "codes_per_s": 50.0}}
LIMITS = ApiLimits(
    max_body_bytes=1_000_000,
    max_audio_parts=1,
    max_image_parts=1,
    max_video_parts=0,
    max_media_bytes=100_000,
    max_audio_s=10.0,
    max_image_pixels=100_000,
    max_decoded_bytes=10_000_000,
    max_output_tokens=64,
    video=VideoLimits(10.0, 16, 100_000),
    max_prompt_tokens=28_000,
)
HEARD = "what is three plus four"
TONE = np.sin(np.arange(4_801) / 10).astype(np.float32)
STAGES = {
    "thinker": {"first_s": 0.25, "last_s": 0.5, "tokens": 7},
    "code2wav": {"first_s": 2, "last_s": 2, "tokens": 0},
}

Answer = Callable[[ChatRequest], Iterator[bytes]]


def parse(body: Any) -> ChatRequest:
    raw = json.dumps(body).encode()
    return open_chat_request(check_chat_request(raw, models=[MODEL], voices=["Chelsie"], limits=LIMITS), {}, LIMITS)


def spoken() -> dict[str, Any]:
    return spoken_body(MODEL, "Chelsie", SPOKEN_QUESTION.read_bytes())


def shown() -> dict[str, Any]:
    return picture_body(MODEL, "Chelsie", png_bytes(question_picture()))


def console_to(file: io.StringIO) -> Console:
    return Console(file=file, width=100)


def served(answer: Answer) -> httpx.Client:
    """A client whose server is `answer`, behind the API's own request checks and event shapes."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [LISTED]})
        if request.url.path == "/v1/audio/transcriptions":
            assert SPOKEN_QUESTION.read_bytes() in request.content
            return httpx.Response(200, json={"text": HEARD})
        return httpx.Response(200, content=answer(parse(json.loads(request.content))))

    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handle))


def words(request: ChatRequest) -> Iterator[bytes]:
    stream = ChatStream(request)
    yield sse.event(stream.start())
    yield from (sse.event(stream.text(text)) for text in ("Hel", "lo [b]all[/b]"))
    if request.wants_audio:
        pieces = Base64Pieces()
        sound = [pieces.push(pcm16(part)) for part in np.array_split(TONE, 7)]
        yield from (sse.event(stream.audio(piece)) for piece in [*sound, pieces.flush()] if piece)
    yield sse.event(stream.finish("stop") | {"omni": {"stages": STAGES}})
    yield sse.DONE


def without(kind: str) -> Answer:
    """Answers that lack a kind of delta: "content" or "data"."""

    def answer(request: ChatRequest) -> Iterator[bytes]:
        for event in words(request):
            if kind == "data" and b'"data":' in event:
                continue
            yield (
                event.replace(b'"content":"Hel"', b'"content":""').replace(
                    b'"content":"lo [b]all[/b]"', b'"content":""'
                )
                if kind == "content"
                else event
            )

    return answer


def test_spoken_question_is_a_valid_request_with_its_sound() -> None:
    request = parse(spoken())
    assert request.stream and request.wants_audio
    assert (request.voice, request.audio_format) == ("Chelsie", "wav")
    samples, rate_hz = soundfile.read(SPOKEN_QUESTION, dtype="float32")
    assert rate_hz == 16_000
    np.testing.assert_allclose(request.audios[0], samples, atol=1 / 32_768)
    assert [part["type"] for part in request.messages[0]["content"]] == ["audio"]


def test_question_about_a_picture_is_a_valid_request_with_it() -> None:
    request = parse(shown())
    assert request.stream and request.wants_audio
    assert request.images[0].tobytes() == question_picture().tobytes()
    image, text = request.messages[0]["content"]
    assert (image["type"], text["text"]) == ("image", PICTURE_QUESTION)


def test_without_a_voice_the_server_chooses() -> None:
    assert parse(spoken_body(MODEL, None, SPOKEN_QUESTION.read_bytes())).voice is None


def test_the_spoken_question_is_small_audible_and_does_not_clip() -> None:
    samples, _ = soundfile.read(SPOKEN_QUESTION, dtype="float32")
    assert SPOKEN_QUESTION.stat().st_size < 60_000
    assert 0.2 < np.abs(samples).max() < 1


def test_the_picture_is_a_red_disc_on_white() -> None:
    colours = {colour: count for count, colour in question_picture().getcolors(maxcolors=1000)}
    # The disc is as wide as half a side of 112.
    assert colours[(215, 25, 30)] == pytest.approx(np.pi * 28**2, rel=0.1)
    assert colours[(255, 255, 255)] == pytest.approx(112**2 - np.pi * 28**2, rel=0.1)


def test_answer_has_text_sound_and_times_in_their_order() -> None:
    heard: list[str] = []
    answer = ask(served(words), spoken(), heard.append)
    assert "".join(heard) == answer.text == "Hello [b]all[/b]"
    assert answer.pcm == pcm16(TONE)
    assert answer.first_text_s is not None and answer.first_audio_s is not None
    assert 0 < answer.first_text_s <= answer.first_audio_s <= answer.total_s
    assert answer.stages["thinker"].tokens == 7 and answer.stages["code2wav"].last_s == 2


def test_what_is_heard_is_written_down() -> None:
    assert written_down(served(words), MODEL, SPOKEN_QUESTION.read_bytes()) == HEARD


def replying(response: httpx.Response | Exception) -> httpx.Client:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (httpx.Response(429, json=error_body("too many requests.", status=429)), "too many requests."),
        (httpx.Response(502, json={}), "502"),
        (httpx.Response(500, text="Internal Server Error"), "500: .Internal Server Error"),
        (httpx.Response(200, text="Hello"), r"(no JSON object|without \[DONE\]); the server's log says why"),
        (httpx.ConnectError("refused"), "http://server .*ConnectError"),
        (httpx.ReadTimeout("slow"), "ReadTimeout"),
    ],
)
def test_a_refusal_is_one_sentence(response: httpx.Response | Exception, sentence: str) -> None:
    with pytest.raises(DemoError, match=sentence):
        first_model(replying(response))
    with pytest.raises(DemoError, match=sentence):
        ask(replying(response), spoken(), lambda text: None)
    with pytest.raises(DemoError, match=sentence):
        written_down(replying(response), MODEL, b"RIFF")


def test_written_wav_is_playable_24_khz_mono() -> None:
    samples, rate_hz = soundfile.read(io.BytesIO(wav_file(pcm16(TONE), 24_000)), dtype="float32")
    assert rate_hz == 24_000 and samples.shape == TONE.shape
    np.testing.assert_allclose(samples, TONE, atol=1 / 32_768)


def test_conversation_leaves_the_sound_and_says_what_came(tmp_path: Path) -> None:
    printed = io.StringIO()
    converse(served(words), "Chelsie", tmp_path, console_to(printed))
    assert all(soundfile.info(tmp_path / name).frames == len(TONE) for name in ("answer.wav", "picture.wav"))
    assert (tmp_path / "question.wav").read_bytes() == SPOKEN_QUESTION.read_bytes()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    said = re.findall(r"^(> .*|transcript: .*|answer: .*)", printed.getvalue(), re.MULTILINE)
    answer = "answer: Hello [b]all[/b]"
    asked = f"> [picture.png] {PICTURE_QUESTION}"
    assert said == ["> [question.wav]", f"transcript: {HEARD}", answer, asked, answer]
    assert all(name in printed.getvalue() for name in ("thinker", "code2wav", "first sound", "answer.wav", "0.20 s"))


@pytest.mark.parametrize(("kind", "missing"), [("content", "no text"), ("data", "no sound")])
def test_conversation_without_text_or_sound_fails(kind: str, missing: str, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=missing):
        converse(served(without(kind)), None, tmp_path, console_to(io.StringIO()))
    assert not (tmp_path / "answer.wav").exists()


def test_text_cannot_command_the_terminal() -> None:
    printed = io.StringIO()
    show("a\x1b[2Jb\nc\x07", console_to(printed))
    assert printed.getvalue() == "a\N{REPLACEMENT CHARACTER}[2Jb\nc\N{REPLACEMENT CHARACTER}"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="file"):
        made_folder(tmp_path / "file")


def test_sound_pieces_decode_one_by_one_and_joined() -> None:
    pieces = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["audio"]["data"]
        for line in b"".join(words(parse(spoken()))).decode().splitlines()
        if '"data":' in line
    ]
    assert base64.b64decode("".join(pieces)) == b"".join(map(base64.b64decode, pieces)) == pcm16(TONE)
