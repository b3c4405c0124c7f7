"""Large media through the HTTP API of the embedded default: what a phone makes, and what the limits allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.http_app import nothing_is_left
from tests.openai_api.bombs import frames, png_bomb
from tests.served.app import BASE_URL, ServedApp, until
from tests.served.leftovers import store_bytes
from tests.served.media_bodies import (
    ANSWERED,
    CHAT,
    MAX_BODY_BYTES,
    MAX_FILE_BYTES,
    body_of,
    filled_film,
    filled_picture,
    film,
    full_body,
    picture,
    sound,
    store_is_at_most,
)

pytestmark = pytest.mark.full

PATIENCE_S = 300


@pytest.mark.parametrize("name", ANSWERED)
async def test_large_media_are_answered_and_leave_nothing(served: ServedApp, name: str) -> None:
    before = store_bytes()
    answer = served.client.post(CHAT, json=ANSWERED[name](), timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    await until(lambda: nothing_is_left(served), "all stages let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], int, str]] = {
    "a picture above the pixels": (
        lambda: body_of(picture(13_378, 13_378, "PNG", plain=True)),
        413,
        "more pixels than the 178956970",
    ),
    "a picture above the bytes": (lambda: body_of(filled_picture(MAX_FILE_BYTES + 1)), 413, "at most 26214400"),
    "sound above the seconds": (lambda: body_of(sound(600 * 16_000 + 16)), 413, "600"),
    "a file above the bytes": (
        lambda: body_of(sound(192_000, 192_000, 8, MAX_FILE_BYTES + 1)),
        413,
        "has 26214401 bytes, but at most 26214400",
    ),
    "a body above the bytes": (lambda: full_body(MAX_BODY_BYTES + 1), 413, "more than 67108864 bytes"),
    "a video above the seconds": (lambda: body_of(film(frames=301, rate=1)), 413, "longer than 300 s"),
    "a video above the bytes": (lambda: body_of(filled_film(MAX_FILE_BYTES + 1)), 413, "at most 26214400"),
    "frames above the pixels": (lambda: body_of(film(size=(4098, 2160), frames=2, rate=2)), 413, "8847360"),
    "frames above their number": (lambda: body_of(frames(*[png_bomb(56, 56)] * 129)), 413, "at most 128"),
    "sound above the prompt": (lambda: body_of(sound(120 * 16_000)), 400, "context length is 1536"),
    "text above the prompt": (lambda: body_of({"type": "text", "text": "word " * 200_000}), 400, "length is 1536"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_too_large_gets_its_sentence_and_leaves_nothing(served: ServedApp, name: str) -> None:
    make, status, words = REFUSED[name]
    before = store_bytes()
    answer = served.client.post(CHAT, json=make(), timeout=PATIENCE_S)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    await until(lambda: nothing_is_left(served), "all stages let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


async def test_media_are_kept_until_their_answer_ends(served: ServedApp) -> None:
    """Should the entry stage be lost, another replica reads them."""
    before = store_bytes()
    talk = {
        "modalities": ["text", "audio"],
        "max_tokens": 16,
        "sampling_params_list": [None, {"max_tokens": 2000, "min_tokens": 2000}, None],
    }
    body = body_of(picture(4000, 3000, "JPEG"), stream=True, **talk)
    async with (
        httpx.AsyncClient(base_url=BASE_URL, timeout=PATIENCE_S) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        lines = response.aiter_lines()
        while '"content"' not in await anext(lines):
            pass
        assert not await store_is_at_most(before)
        assert not await nothing_is_left(served)  # the talker still speaks
    await until(lambda: nothing_is_left(served), "all stages let go of the request")
    await until(lambda: store_is_at_most(before), "no object of the request is left in the store")


async def test_media_of_a_client_that_leaves_are_freed(served: ServedApp) -> None:
    before = store_bytes()
    async with httpx.AsyncClient(base_url=BASE_URL, timeout=0.5) as client:
        for parts in ([sound(60 * 16_000)], [picture(4000, 3000, "JPEG")]):
            with pytest.raises(httpx.TimeoutException):
                await client.post(CHAT, json=body_of(*parts, max_tokens=512, ignore_eos=True))
    await until(lambda: nothing_is_left(served), "all stages let go of the requests")
    await until(lambda: store_is_at_most(before), "no object of the requests is left in the store")
