"""The processes that decode: what hostile files, slow ones and clients that leave do to them, and to nobody else."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from omni_cluster.models.qwen2_5_omni.video_frames import FRAMES
from omni_cluster.openai_api import decoders as decoders_module
from omni_cluster.openai_api.chat import check_chat_request, open_chat_request
from omni_cluster.openai_api.decoder import Form
from omni_cluster.openai_api.decoders import DecoderFailed, DecoderLimits, Decoders
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.limits import ApiLimits
from omni_cluster.openai_api.messages import MediaUrl
from omni_cluster.openai_api.parcel import Parcel, ParcelError, packed, unpacked
from omni_cluster.openai_api.transcription import open_transcription
from omni_cluster.openai_api.video import VideoLimits
from tests.openai_api.bombs import frames, image, long_video, png_bomb, png_claiming, video
from tests.openai_api.films import video_file
from tests.openai_api.forms import CONTENT_TYPE, form, sound
from tests.openai_api.parts import audio_part, png_of, wav_of
from tests.processes import command_line, resident_bytes, running_after

PATIENCE_S = 120
LIMITS = ApiLimits(
    max_body_bytes=64 << 20,
    max_audio_parts=4,
    max_image_parts=4,
    max_video_parts=2,
    max_media_bytes=25 << 20,
    max_audio_s=600.0,
    max_image_pixels=178_956_970,
    max_decoded_bytes=512 << 20,
    max_output_tokens=256,
    video=VideoLimits(max_s=300.0, max_frames=128, max_frame_pixels=8_847_360, frames=FRAMES),
    max_prompt_tokens=28_000,
)
BOUNDS = DecoderLimits(processes=1, memory_bytes=1 << 30, timeout_s=PATIENCE_S, max_held_bytes=512 << 20)


def body_of(*parts: Mapping[str, Any], **fields: Any) -> bytes:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    return json.dumps({"model": "omni", "messages": messages, **fields}).encode()


@asynccontextmanager
async def decoders(limits: ApiLimits = LIMITS, **bounds: Any) -> AsyncIterator[Decoders]:
    pool = Decoders(replace(BOUNDS, **bounds), limits, ["omni"], ["Ethan"])
    try:
        yield pool
    finally:
        pool.close()
        await until(lambda: not children(), "the decoders end with their pool")


_of_others: set[psutil.Process] = set()
"""Decoders of a server that earlier modules started in this process."""


@pytest.fixture(scope="module", autouse=True)
def _others_are_known() -> None:
    _of_others.update(children())


def children() -> list[psutil.Process]:
    found = set(psutil.Process().children()) - _of_others
    return [each for each in found if "omni_cluster.openai_api.decoder" in command_line(each)]


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def none_fetched(urls: Sequence[MediaUrl]) -> Mapping[str, bytes]:
    raise AssertionError(f"nothing is to be fetched: {urls}")


async def refused(pool: Decoders, body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await pool.open(body, none_fetched)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message
    return caught.value


def test_the_room_loads_without_the_heavy_libraries() -> None:
    code = (
        "import sys, omni_cluster.openai_api.decoder\n"
        "print(sorted({'vllm', 'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_request_comes_back_as_it_would_have_been_read_here() -> None:
    parts = [
        image(png_of("red", (17, 5))),
        audio_part(wav_of(range(0, 3_000, 7))),
        video(video_file(frames=40, sound="aac")),
        image(png_of("blue")),
    ]
    named = {"stage_sampling_params": {"talker": {"temperature": 0.5, "stop_token_ids": [7]}}}
    body = body_of(*parts, use_audio_in_video=True, seed=3, stop=["a", "b"], audio={"voice": "Ethan"}, **named)
    checked = check_chat_request(body, models=["omni"], voices=["Ethan"], limits=LIMITS)
    expected = open_chat_request(checked, {}, LIMITS)
    async with decoders() as pool:
        found = await pool.open(body, none_fetched)
    bare = {"audios": (), "images": (), "videos": ()}
    assert repr(replace(found, **bare)) == repr(replace(expected, **bare))
    for mine, theirs in zip([*found.audios, *found.images], [*expected.audios, *expected.images], strict=True):
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    for one, other in zip(found.videos, expected.videos, strict=True):
        assert one.fps == other.fps and np.array_equal(one.frames, other.frames)
        assert one.audio is not None and other.audio is not None and np.array_equal(one.audio, other.audio)


async def test_frames_that_are_scaled_are_scaled_to_the_bit() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (72, 128, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise.repeat(10, 0).repeat(10, 1)).save(file, "PNG")
    picture = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    body = body_of(frames(*[picture] * 44))
    checked = check_chat_request(body, models=["omni"], voices=["Ethan"], limits=LIMITS)
    (expected,) = open_chat_request(checked, {}, LIMITS).videos
    async with decoders() as pool:
        (found,) = (await pool.open(body, none_fetched)).videos
        assert found.frames.shape[1:3] != (720, 1_280) and np.array_equal(found.frames, expected.frames)


async def test_a_form_comes_back_with_its_sound_decoded() -> None:
    body = form(("model", "omni"), ("language", "en"), ("prompt", "Qwen"), file=sound(0.25))
    kind = Form(CONTENT_TYPE, "translate")
    async with decoders() as pool:
        made = await pool.open_form(body, kind)
        with pytest.raises(BadRequest) as caught:
            await pool.open_form(form(("model", "omni"), file=b"no sound"), kind)
    here = open_transcription(body, CONTENT_TYPE, "translate", models=["omni"], limits=LIMITS)
    np.testing.assert_array_equal(made.samples, here.samples)
    assert {**vars(made), "samples": 0} == {**vars(here), "samples": 0}
    assert (caught.value.param, caught.value.status) == ("file", 415)


async def test_what_is_named_by_url_is_fetched_between() -> None:
    asked = []

    async def fetch(urls: Sequence[MediaUrl]) -> Mapping[str, bytes]:
        asked.extend(urls)
        return {each.param: base64.b64decode(png_of("red").split(",")[1]) for each in urls}

    async with decoders() as pool:
        found = await pool.open(body_of(image("https://example.com/a.png")), fetch)
    assert [each.url for each in asked] == ["https://example.com/a.png"]
    assert found.images[0][0, 0].tolist() == [255, 0, 0]


async def test_a_response_s_request_comes_back_with_what_it_repeats() -> None:
    asked = []

    async def fetch(urls: Sequence[MediaUrl]) -> Mapping[str, bytes]:
        asked.extend(each.param for each in urls)
        return {each.param: base64.b64decode(png_of("red").split(",")[1]) for each in urls}

    part = {"type": "input_image", "image_url": "https://example.com/a.png"}
    items = [{"role": "user", "content": [part, part | {"image_url": png_of("blue")}]}]
    body = json.dumps({"model": "omni", "input": items, "metadata": {"a": "b"}, "instructions": "Go."}).encode()
    async with decoders() as pool:
        found = await pool.open_response(body, fetch)
        with pytest.raises(BadRequest, match=r"^input\[0\]\.content\[0\]\.image_url "):
            await pool.open_response(body.replace(b"https://example.com/a.png", b"data:,"), fetch)
    assert asked == ["input[0].content[0].image_url"]
    assert [picture[0, 0].tolist() for picture in found.chat.images] == [[255, 0, 0], [0, 0, 255]]
    assert found.repeated["metadata"] == {"a": "b"} and found.chat.messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ([image(png_claiming(20_000, 20_000))], "image_too_large", "more pixels than the 178956970"),
        ([image(png_claiming(9_000, 9_000))] * 4, "media_too_large", "at most 536870912 are accepted"),
        ([frames(*[png_claiming(3_000, 3_000)] * 16)], "video_frame_too_large", "3000 x 3000 pixels"),
        ([frames(*[png_claiming(2_000, 2_000)] * 60, *[png_claiming(900, 800)])], "bad_video", "900 x 800"),
    ],
    ids=["a picture", "pictures together", "a list of pictures", "pictures of two sizes"],
)
async def test_headers_are_enough_to_refuse(parts: list[dict[str, Any]], code: str, words: str) -> None:
    async with decoders() as pool:
        error = await refused(pool, body_of(*parts))
        assert error.code == code and words in error.message
        assert max(resident_bytes(each) for each in children()) < 300 << 20


async def test_a_deployment_may_accept_larger_pictures_than_pillow_does() -> None:
    limits = replace(LIMITS, max_image_pixels=200_000_000, max_decoded_bytes=600_000_000)
    async with decoders(limits) as pool:
        assert (await refused(pool, body_of(image(png_claiming(20_000, 10_000))))).code == "bad_image"
        error = await refused(pool, body_of(image(png_claiming(20_000, 10_001))))
        assert error.code == "image_too_large" and "more pixels than the 200000000" in error.message


async def test_all_kinds_of_media_count_together() -> None:
    limits = replace(LIMITS, max_decoded_bytes=1_000_000)
    sound, picture = audio_part(wav_of([1] * 100_000)), image(png_of("red", (450, 450)))
    seen = video(video_file(frames=60, size=(400, 240)))
    async with decoders(limits) as pool:
        for parts in ([sound], [picture]):
            await pool.open(body_of(*parts), none_fetched)
        for parts in ([sound, picture], [picture, sound], [sound] * 3, [seen], [picture, seen], [seen, picture]):
            error = await refused(pool, body_of(*parts))
            assert (error.status, error.code) == (413, "media_too_large")
            assert "at most 1000000 are accepted" in error.message


async def test_more_memory_than_its_bound_is_refused_and_the_next_request_is_fine() -> None:
    async with decoders(memory_bytes=128 << 20) as pool:
        error = await refused(pool, body_of(image(png_bomb(13_000, 13_000))))
        assert (error.status, error.code) == (413, "media_too_large")
        assert f"more than {128 << 20} bytes of memory" in error.message
        assert (await pool.open(body_of(image(png_of("red"))), none_fetched)).images[0].shape == (4, 5, 3)


async def test_a_number_that_does_not_travel_is_refused_and_its_process_goes_on() -> None:
    weather = {"name": "weather", "parameters": {"properties": {"day": {"maximum": 10**30}}}}
    async with decoders() as pool:
        body = body_of(image(png_of("red")), tools=[{"type": "function", "function": weather}])
        error = await refused(pool, body)
        assert (error.status, error.code) == (400, "invalid_value")
        assert "a whole number of more than 64 bits" in error.message
        (before,) = children()
        assert (await pool.open(body_of(image(png_of("red"))), none_fetched)).images[0].shape == (4, 5, 3)
        assert children() == [before]


async def test_a_process_that_ends_in_the_middle_is_its_requests_fault() -> None:
    async with decoders() as pool:
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        asked = asyncio.create_task(refused(pool, body_of(long_video())))
        await working(process)
        process.kill()
        assert (await asked).code == "media_unreadable"
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1
        assert process not in children()


async def working(process: psutil.Process) -> None:
    """Until it is seen to compute."""
    before_s = process.cpu_times().user
    await until(lambda: process.cpu_times().user > before_s + 0.1, "the decoder works")


async def test_a_request_that_outlasts_its_time_is_refused_and_its_process_replaced() -> None:
    async with decoders(timeout_s=30.0) as pool:
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        process.suspend()  # as one that computes for ever
        pool._bounds = replace(pool._bounds, timeout_s=0.2)
        error = await refused(pool, body_of(image(png_of("red"))))
        assert (error.status, error.code) == (413, "media_too_slow")
        await until(lambda: not process.is_running(), "the process ends")
        pool._bounds = replace(pool._bounds, timeout_s=PATIENCE_S)
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1


async def test_a_client_that_leaves_frees_its_process() -> None:
    async with decoders() as pool:
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        asked = asyncio.create_task(pool.open(body_of(long_video()), none_fetched))
        await working(process)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not process.is_running(), "its process ends")
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1


@asynccontextmanager
async def one_kept_ready(pool: Decoders) -> AsyncIterator[None]:
    keeping = asyncio.create_task(pool.keep_one_ready())
    try:
        yield
    finally:
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping


async def test_one_is_ready_before_any_request_and_has_the_first() -> None:
    async with decoders(processes=2) as pool, one_kept_ready(pool):
        await until(lambda: len(children()) == 1, "a decoder is started without a request")
        ready = children()
        await until(lambda: ready[0].status() == psutil.STATUS_SLEEPING and bool(pool._idle), "it is ready")
        for _ in range(2):
            await pool.open(body_of(image(png_of("red"))), none_fetched)
        assert children() == ready


@pytest.mark.parametrize("ends", ["by itself", "with its client"])
async def test_another_is_ready_once_one_has_ended_and_never_one_too_many(ends: str) -> None:
    async with decoders() as pool, one_kept_ready(pool):
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        asked = asyncio.create_task(pool.open(body_of(long_video()), none_fetched))
        await working(process)
        waiting = asyncio.create_task(pool.open(body_of(image(png_of("red"))), none_fetched))
        _ = process.kill() if ends == "by itself" else asked.cancel()
        (error,) = await asyncio.gather(asked, return_exceptions=True)
        assert isinstance(error, BadRequest if ends == "by itself" else asyncio.CancelledError)
        counts = set()

        def another_is_ready() -> bool:
            running = [each for each in children() if each != process]
            counts.add(len(running))
            return bool(running) and bool(pool._idle) and waiting.done()

        await until(another_is_ready, "another decoder is ready")
        assert counts <= {0, 1} and len((await waiting).images) == 1


async def test_one_that_ends_while_it_is_idle_is_nobody_s_fault_and_replaced() -> None:
    async with decoders(processes=2) as pool:
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        process.kill()
        # Until then it may take the job along, as one that its job ends.
        await until(lambda: process not in children(), "it has ended")
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1
        async with one_kept_ready(pool):
            (second,) = [each for each in children() if each != process]
            second.kill()

            def another_is_ready() -> bool:
                return bool(pool._idle) and any(each not in (process, second) for each in children())

            await until(another_is_ready, "another is ready without a request")


async def test_one_that_is_being_started_as_the_pool_closes_ends() -> None:
    pool = Decoders(BOUNDS, LIMITS, ["omni"], ["Ethan"])
    keeping = asyncio.create_task(pool.keep_one_ready())
    await until(lambda: bool(children()), "one is being started")
    pool.close()
    await keeping
    await until(lambda: not children(), "it ends")


async def test_one_that_is_being_made_as_its_client_leaves_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    command, may_go_on = decoders_module._command, threading.Event()

    def slowly(*figures: Any) -> list[str]:
        may_go_on.wait(PATIENCE_S)
        return command(*figures)

    monkeypatch.setattr(decoders_module, "_command", slowly)
    async with decoders() as pool:
        asked = asyncio.create_task(pool.open(body_of(image(png_of("red"))), none_fetched))
        await until(lambda: pool._room.locked(), "its decoder is being made")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        may_go_on.set()
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1
        await until(lambda: len(children()) == 1, "the one that nobody waits for ends")


async def test_one_that_does_not_start_is_logged_and_tried_again_by_a_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = decoders_module._command
    monkeypatch.setattr(decoders_module, "_command", lambda *_: ["false"])
    async with decoders() as pool, one_kept_ready(pool):
        await until(lambda: "no decoder is ready" in caplog.text, "it is logged")
        with pytest.raises(DecoderFailed, match="does not start"):
            await pool.open(body_of(image(png_of("red"))), none_fetched)
        monkeypatch.setattr(decoders_module, "_command", command)
        assert len((await pool.open(body_of(image(png_of("red"))), none_fetched)).images) == 1


async def test_requests_wait_while_decoded_media_are_held() -> None:
    async with decoders(max_held_bytes=1_000_000) as pool:
        held = await pool.open(body_of(image(png_bomb(1_000, 1_000))), none_fetched)
        waiting = asyncio.create_task(pool.open(body_of(image(png_of("red"))), none_fetched))
        (process,) = children()
        await until(lambda: process.status() == psutil.STATUS_SLEEPING, "the decoder has nothing to do")
        before_s = process.cpu_times()
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done and process.cpu_times() == before_s
        del held
        gc.collect()
        assert (await waiting).images[0].shape == (4, 5, 3)


def test_a_decoder_ends_with_its_ingress_even_in_the_middle_of_a_request() -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.openai_api.test_decoders import *\n"
        "async def main():\n"
        "    pool = Decoders(BOUNDS, LIMITS, ['omni'], ['Ethan'])\n"
        "    await pool.open(body_of(image(png_of('red'))), none_fetched)\n"
        "    (process,) = children()\n"
        "    asked = asyncio.create_task(pool.open(body_of(long_video()), none_fetched))\n"
        "    await working(process)\n"
        "    print(process.pid, flush=True)\n"
        "    await asked\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert not running_after([process], PATIENCE_S)


async def test_a_decoder_is_told_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_API_KEYS", "a-secret")
    async with decoders() as pool:
        await pool.open(body_of(image(png_of("red"))), none_fetched)
        (process,) = children()
        assert "OMNI_API_KEYS" not in process.environ()


class TestParcel:
    def test_arrays_come_in_place_and_read_only(self) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        found = unpacked(packed({"a": array, "b": 1}, 1 << 20), dict[str, Any], 1 << 20)
        assert found["b"] == 1 and found["a"]["shape"] == [3, 4]  # Any: nobody said that it is an array
        typed = unpacked(packed({"a": array}, 1 << 20), dict[str, np.ndarray], 1 << 20)
        assert np.array_equal(typed["a"], array) and not typed["a"].flags.writeable

    def test_what_is_too_large_is_neither_written_nor_read(self) -> None:
        message = {"a": np.zeros(1_000, np.uint8)}
        with pytest.raises(ParcelError, match="at most 999"):
            packed(message, 999)
        with pytest.raises(ParcelError, match="999 are accepted"):
            unpacked(packed(message, 2_000), dict[str, np.ndarray], 999)

    def test_what_may_still_change_is_not_read(self) -> None:
        descriptor = os.memfd_create("parcel", os.MFD_ALLOW_SEALING)
        os.write(descriptor, bytes(100))
        with pytest.raises(ParcelError, match="not sealed"):
            unpacked(Parcel(descriptor), dict[str, Any], 1 << 20)

    @pytest.mark.parametrize(
        "place",
        [
            {"dtype": "uint8", "shape": [1 << 40], "start_bytes": 0},
            {"dtype": "uint8", "shape": [8], "start_bytes": -8},
            {"dtype": "uint8", "shape": [-1], "start_bytes": 0},
            {"dtype": "object", "shape": [1], "start_bytes": 0},
            {"dtype": "float32", "shape": [1, 1, 1, 1, 1], "start_bytes": 0},
            {"dtype": "float32", "shape": ["1"], "start_bytes": 0},
            "no place",
        ],
    )
    def test_a_place_outside_of_it_is_refused(self, place: Any) -> None:
        with pytest.raises(ParcelError):
            unpacked(packed({"a": place}, 1 << 20), dict[str, np.ndarray], 1 << 20)

    @pytest.mark.parametrize("seed", range(200))
    def test_bytes_that_changed_are_refused_or_read_within_bounds(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        whole = packed({"a": np.arange(64, dtype=np.uint8)}, 1 << 20)
        data = bytearray(os.pread(whole.descriptor, 1 << 20, 0))
        for place in rng.integers(0, 80, 3):
            data[place] = rng.integers(0, 256)
        descriptor = os.memfd_create("parcel", os.MFD_ALLOW_SEALING)
        os.write(descriptor, data)
        changed = Parcel(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.fcntl(whole.descriptor, fcntl.F_GET_SEALS))
        try:
            found = unpacked(changed, dict[str, np.ndarray], 1 << 20)
        except ParcelError:
            return
        assert all(array.nbytes <= len(data) for array in found.values())
