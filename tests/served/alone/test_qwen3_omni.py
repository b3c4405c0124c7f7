"""Qwen3-Omni behind HTTP: what transformers says, whole and in pieces, also when a replica of a stage is killed."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import torch
import yaml
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_cluster.batch import Application, answer_rows
from omni_cluster.bench.result import read_result
from omni_cluster.cli import main
from omni_cluster.models.qwen3_omni.checkpoint import embedded_checkpoint
from omni_cluster.models.qwen3_omni.video_frames import FRAMES
from omni_cluster.openai_api.budget import Budget
from omni_cluster.openai_api.video import VideoLimits, decode_video
from omni_cluster.types.inputs import Media
from tests.adapters import merged, write_adapter
from tests.http_app import PCM16_STEP, WAVE_TOLERANCE, as_parts, chat, events, sounds
from tests.models.qwen3_omni.thinker_reference import media_of, prompt_text
from tests.models.qwen3_omni.whole_reference import MAX_CODES, MAX_TOKENS, Reference, Spoken
from tests.openai_api.films import video_file
from tests.served.app import BASE_URL, KEY, ROOT, ServedApp, serve_run
from tests.served.recovering import Moment, Recovering, kill_replica, much_sound, sound_begins
from tests.server.bad_inputs import png
from tests.server.expected import QUESTION, as_pictures, data_url
from tests.server.realtime.talk import sound_of, talk, text_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
LENGTHS = {"max_tokens": MAX_TOKENS, "stage_sampling_params": {"talker": {"max_tokens": MAX_CODES}}}
ADAPTER = "support"
MIX = "image+video+audio"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / ADAPTER
    return write_adapter(folder, embedded_checkpoint(), seed=1, projections=("q_proj", "k_proj", "v_proj", "o_proj"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[ServedApp]:
    """Two replicas of each stage."""
    config = yaml.safe_load((ROOT / "stage_configs" / "qwen3_omni_tiny.yaml").read_text())
    config["stages"][0]["advanced"]["lora_adapters"] = {ADAPTER: str(adapter)}
    for stage in config["stages"]:
        stage["num_replicas"] = 2
    path = tmp_path_factory.mktemp("config") / "pairs.yaml"
    path.write_text(yaml.safe_dump(config))
    with serve_run(f"config={path}") as app:
        yield app


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(embedded_checkpoint())


def reference_of(folder: Path) -> Reference:
    return Reference(folder, Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def recovering(served: ServedApp) -> Recovering:
    """Pieces of a stream are exactly the whole sound."""
    lengths, short = {"thinker": 300, "talker": 600}, {"thinker": 8, "talker": 16}
    return Recovering(served, lengths, short, voice="ethan", tolerance=WAVE_TOLERANCE)


def asked(kind: str, voice: str, audio_format: str, **options: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": parts_of(kind)}]
    audio = {"voice": voice, "format": audio_format}
    return {"messages": messages, "modalities": ["text", "audio"], "audio": audio, **LENGTHS, **options}


def parts_of(kind: str) -> list[dict[str, Any]]:
    """In the order of their places; a video as pictures, without loss."""
    (one_video,) = media_of(kind).videos or (None,)
    parts = {part: as_parts(part)[0] for part in ("audio", "image") if part in kind}
    if one_video is not None:
        parts["video"] = parts["odd"] = as_pictures(one_video)
    return [QUESTION] if kind == "text" else [*(parts[part] for part in kind.split("+")), QUESTION]


def samples_in(sound: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(sound)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768


def samples_of(pcm: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(pcm), "<i2") / 32768


def as_sent(given: Media) -> Media:
    """What a client sends are 16-bit samples."""
    audios = [np.round(a * 32768).clip(-32768, 32767).astype(np.float32) / 32768 for a in given.audios]
    return replace(given, audios=tuple(audios))


def assert_spoken(answer: dict[str, Any], reference: Reference, expected: Spoken) -> None:
    message = answer["choices"][0]["message"]
    # vLLM keeps back bytes that are no whole character yet.
    said = reference.decoded(expected.token_ids)
    assert said.startswith(message["content"]) and set(said.removeprefix(message["content"])) <= {"\ufffd"}
    samples = samples_in(base64.b64decode(message["audio"]["data"]))
    np.testing.assert_allclose(samples, expected.sound, atol=WAVE_TOLERANCE + PCM16_STEP)
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == len(expected.codes)


@pytest.mark.parametrize(
    ("kind", "voice"),
    [
        ("text", "Ethan"),
        ("audio", "chelsie"),
        ("image", "ethan"),
        ("audio+image", "aiden"),
        ("video", "chelsie"),
        ("odd", "ethan"),
        (MIX, "aiden"),
    ],
)
def test_the_http_answer_has_the_text_and_sound_of_transformers(
    served: ServedApp, reference: Reference, kind: str, voice: str
) -> None:
    expected = reference.reply(prompt_text(kind), as_sent(media_of(kind)), voice.lower())
    assert_spoken(chat(served, "", **asked(kind, voice, "wav")).json(), reference, expected)


def test_the_sound_of_a_film_is_in_the_answer_of_transformers(served: ServedApp, reference: Reference) -> None:
    film = video_file(frames=8, rate=4, size=(84, 56), sound="aac")
    options = {"fps": 2.0, "with_audio": True, "max_audio_s": 10.0, "budget": Budget(1 << 24), "param": "film"}
    given = Media(videos=(decode_video(film, limits=VideoLimits(10.0, 16, 1 << 20, FRAMES), **options),))
    expected = reference.reply(prompt_text("heard"), given, "chelsie")
    part = {"type": "video_url", "video_url": {"url": data_url(film, "video/mp4")}}
    body = asked("text", "chelsie", "wav", use_audio_in_video=True)
    body["messages"][1]["content"] = [part, QUESTION]
    assert_spoken(chat(served, "", **body).json(), reference, expected)


def test_an_adapter_that_the_model_names_answers_as_merged_weights(
    served: ServedApp, reference: Reference, adapter: Path, tmp_path: Path
) -> None:
    merged_weights = reference_of(merged(adapter, embedded_checkpoint(), tmp_path / "merged"))
    given = prompt_text("audio+image"), as_sent(media_of("audio+image")), "ethan"
    expected = merged_weights.reply(*given)
    assert expected.token_ids != reference.reply(*given).token_ids
    assert_spoken(
        chat(served, "", **asked("audio+image", "ethan", "wav", model=ADAPTER)).json(), merged_weights, expected
    )
    unknown = chat(served, "", **asked("text", "ethan", "wav", model="legal"))
    assert unknown.status_code == 404 and f"use one of {served.model}, {ADAPTER}" in unknown.json()["error"]["message"]


def test_a_stream_is_the_whole_answer(served: ServedApp) -> None:
    whole = chat(served, "", **asked("image", "ethan", "pcm16")).json()["choices"][0]["message"]
    streamed = events(chat(served, "", **asked("image", "ethan", "pcm16", stream=True)))
    deltas = [event["choices"][0]["delta"] for event in streamed if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    pieces = sounds(streamed)
    assert len(pieces) > 1
    made, wanted = samples_of("".join(pieces)), samples_of(whole["audio"]["data"])
    assert len(made) == len(wanted) == 1_920 * (MAX_CODES - 1) - 555
    np.testing.assert_allclose(made, wanted, atol=WAVE_TOLERANCE + PCM16_STEP)


def test_a_text_is_spoken_and_a_sound_written_down(served: ServedApp) -> None:
    spoken = served.client.post(
        "/v1/audio/speech",
        json={"model": served.model, "input": "Hello world.", "voice": "Aiden", "response_format": "wav"},
    )
    assert spoken.status_code == 200
    with wave.open(io.BytesIO(spoken.content)) as file:
        assert file.getframerate() == 24_000 and (file.getnframes() + 555) % 1_920 == 0
    files, form = {"file": ("a.wav", spoken.content, "audio/wav")}, {"model": served.model, "language": "en"}
    written = served.client.post("/v1/audio/transcriptions", files=files, data=form)
    assert written.status_code == 200 and written.json()["text"]


async def test_a_realtime_session_says_what_a_chat_does(served: ServedApp) -> None:
    """Of a text, and then of a sound behind it."""
    sound = (np.sin(np.arange(24_000) / 20) * 8_000).astype("<i2").tobytes()
    async with talk(BASE_URL, KEY) as client:
        await client.update(
            instructions=SYSTEM["content"],
            output_modalities=["audio"],
            audio={"output": {"voice": "chelsie"}, "input": {"turn_detection": None}},
        )
        await client.say("Hello world.")
        first = await client.answer()
        await client.send("input_audio_buffer.append", audio=base64.b64encode(sound).decode())
        await client.send("input_audio_buffer.commit")
        await client.until("conversation.item.done")
        second = await client.answer()
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Hello world."}]
    asks = {"modalities": ["text", "audio"], "audio": {"voice": "chelsie", "format": "pcm16"}}
    whole = chat(served, "", messages=messages, **asks).json()["choices"][0]["message"]
    assert text_of(first) == whole["content"]
    made, wanted = sound_of(first) / 32768, samples_of(whole["audio"]["data"])
    np.testing.assert_allclose(made, wanted, atol=WAVE_TOLERANCE + PCM16_STEP)
    # Another answer, of random weights, which goes on until its length.
    assert text_of(second) and not np.array_equal(sound_of(first), sound_of(second))
    response = second[-1]["response"]
    assert (response["status"], response["status_details"]["reason"]) == ("incomplete", "max_output_tokens")


def test_rows_of_a_batch_get_what_a_chat_says(served: ServedApp, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    text = {"type": "text", "text": "What is it?"}
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    asks = {"max_tokens": 8, "seed": 3, "modalities": ["text", "audio"]}
    rows = [
        {"id": "spoken", "messages": [{"role": "user", "content": [text]}], "voice": "Ethan", **asks},
        {
            "id": "seen",
            "messages": [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "a.png")}, text]}],
            "voice": "aiden",
            **asks,
        },
        {"id": "voiceless", "messages": [{"role": "user", "content": [text]}], "voice": "Nobody", **asks},
    ]
    answers = {
        each["id"]: each for each in answer_rows(ray.data.from_items(rows), Application(url=BASE_URL)).take_all()
    }
    parts = {"spoken": [text], "seen": [{"type": "image_url", "image_url": {"url": url}}, text]}
    for (name, content), voice in zip(parts.items(), ("Ethan", "aiden"), strict=True):
        messages = [{"role": "user", "content": content}]
        direct = chat(served, "", messages=messages, audio={"voice": voice, "format": "wav"}, **asks).json()
        made, message = answers[name], direct["choices"][0]["message"]
        assert (made["error"], made["text"]) == (None, message["content"])
        assert made["audio_tokens"] == direct["usage"]["completion_tokens_details"]["audio_tokens"]
        wanted = samples_in(base64.b64decode(message["audio"]["data"]))
        np.testing.assert_allclose(samples_in(made["sound"]), wanted, atol=WAVE_TOLERANCE + PCM16_STEP)
    assert "aiden, chelsie, ethan" in answers["voiceless"]["error"] and answers["voiceless"]["sound"] is None


@pytest.mark.parametrize("options", ["", "--mix --mix-sound 0.2 0.6 --mix-prompt 5 30"])
def test_the_bench_measures_it(served: ServedApp, tmp_path: Path, options: str) -> None:
    codes = 20
    lengths = f"--prompt-tokens 12 --text-tokens 6 --codec-tokens {codes}"
    cells = f"--concurrency 2 --requests 4 --warmup 1 {options or lengths}"
    assert main(f"bench --url {BASE_URL} {cells} --out {tmp_path}".split()) == 0
    (cell,) = read_result(tmp_path / "result.json").cells
    assert (cell.requests, cell.errors) == (4, 0) and set(cell.stages) == {"thinker", "talker", "code2wav"}
    assert 0 < cell.figures["first_text_s"].p50 <= cell.figures["first_audio_s"].p50 <= cell.figures["jct_s"].p50
    if not options:
        # The last code of a full length is none.
        assert cell.figures["codec_tokens"].p50 == codes - 1
        assert cell.figures["audio_s"].p50 == pytest.approx((1_920 * (codes - 1) - 555) / 24_000)


def test_a_voice_that_is_not_there_is_refused(served: ServedApp) -> None:
    answer = chat(served, "", **asked("text", "Nobody", "wav"))
    assert answer.status_code == 400
    assert "aiden, chelsie, ethan" in answer.json()["error"]["message"]


@pytest.mark.parametrize("moment", [sound_begins, much_sound])
@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stream_goes_on_when_a_replica_is_killed(recovering: Recovering, stage: str, moment: Moment) -> None:
    assert await recovering.survives(recovering.body(), (moment, kill_replica, stage)) == {stage: 1}


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stream_about_media_goes_on_when_a_replica_is_killed(recovering: Recovering, stage: str) -> None:
    body = recovering.body(parts_of(MIX))
    assert await recovering.survives(body, (sound_begins, kill_replica, stage)) == {stage: 1}


async def test_a_stream_of_an_adapter_goes_on_when_the_thinker_is_killed(recovering: Recovering) -> None:
    body = recovering.body(model=ADAPTER)
    assert (await recovering.undisturbed(body)).text != (await recovering.undisturbed(recovering.body())).text
    assert await recovering.survives(body, (sound_begins, kill_replica, "thinker")) == {"thinker": 1}
