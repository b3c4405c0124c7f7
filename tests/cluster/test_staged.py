"""Media on their way to the entry stage: what comes out is what went in, to the bit."""

from __future__ import annotations

import asyncio
import gc
import pickle
import weakref
from typing import cast

import numpy as np
import pytest
import ray
from PIL import Image
from ray.exceptions import ObjectStoreFullError

from omni_cluster.cluster.failures import named_failures
from omni_cluster.cluster.staged import MAX_CARRIED_BYTES, IncomingMedia, StagedRequest, staged
from omni_cluster.cluster.transport import MAX_VALUE_BYTES, RemoteStage, Ticket
from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint
from omni_cluster.types.errors import StoreFull
from omni_cluster.types.inputs import Media, OmniRequest, Video
from tests.reference import media as media_of

NOISE = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return NOISE.integers(0, 256, shape, np.uint8)


def all_kinds() -> Media:
    sound = NOISE.standard_normal(16_001).astype(np.float32)
    images = tuple(Image.fromarray(noise(*size, 3)) for size in ((1, 1), (37, 53), (720, 1280)))
    video = Video(noise(4, 56, 84, 3), 2.0, sound[:99])
    return Media((sound, sound[:1]), images, (video, Video(noise(2, 28, 28, 3), 1.5)))


def all_kinds_small() -> Media:
    sound = NOISE.standard_normal(99).astype(np.float32)
    return Media(
        (sound,), (Image.fromarray(noise(3, 5, 3)), noise(4, 4, 3)), (Video(noise(2, 28, 28, 3), 2.0, sound[:9]),)
    )


def assert_same(got: Media, wanted: Media) -> None:
    for ours, theirs in zip((*got.audios, *got.images), (*wanted.audios, *wanted.images), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    for video, other in zip(got.videos, wanted.videos, strict=True):
        assert np.array_equal(video.frames, other.frames) and video.fps == other.fps
        assert video.audio is not None and other.audio is not None and np.array_equal(video.audio, other.audio)


def travelled(sent: Media) -> tuple[Media, int]:
    """As Ray stores it: arrays out of band and read-only; and the bytes of what is not among them."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(body, buffers=[bytes(b.raw()) for b in buffers]), len(body)


def test_all_media_arrive_as_they_were() -> None:
    media = all_kinds()
    sent, num_bytes = travelled(media.as_arrays())
    got = sent.as_images()
    assert num_bytes < 4000  # all of the media is read where it lies
    for array, other in zip(got.audios, media.audios, strict=True):
        assert array.dtype == np.float32 and np.array_equal(array, other)
    for image, other_image in zip(got.images, media.images, strict=True):
        assert (image.mode, image.size, image.tobytes()) == ("RGB", other_image.size, other_image.tobytes())
    for video, other_video in zip(got.videos, media.videos, strict=True):
        assert np.array_equal(video.frames, other_video.frames) and video.fps == other_video.fps
    assert got.videos[0].audio is not None and np.array_equal(got.videos[0].audio, media.videos[0].audio)
    assert got.videos[1].audio is None


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_an_image_of_another_mode_stays_one(mode: str) -> None:
    image = Image.fromarray(noise(20, 30, 3)).convert(mode)
    (got,) = travelled(Media(images=(image,)).as_arrays())[0].as_images().images
    assert got.mode == mode and got.convert("RGB").tobytes() == image.convert("RGB").tobytes()


def test_the_processor_makes_the_same_of_them() -> None:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(embedded_checkpoint("tiny"))
    _, (image,) = media_of("image")
    (got,) = travelled(Media(images=(image,)).as_arrays())[0].as_images().images
    before, after = (processor(images=[each], return_tensors="np")["pixel_values"] for each in (image, got))
    assert np.array_equal(before, after)


async def test_a_store_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: object) -> None:
        raise ObjectStoreFullError

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(StoreFull, match="is full and cannot take this request"):
        async with staged(OmniRequest("r", "", all_kinds())):
            pass


async def test_a_request_without_media_puts_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray, "put")
    async with staged(OmniRequest("r", "a prompt")) as sent:
        assert not sent.has_stored_media and sent.request.prompt == "a prompt"


def of_bytes(kind: str, size_bytes: int) -> Media:
    pixels = noise(1, 1, size_bytes)
    return {
        "sound": lambda: Media((np.zeros(size_bytes // 4, np.float32),)),
        "image": lambda: Media(images=(pixels,)),
        "grey image": lambda: Media(images=(Image.fromarray(pixels[0]),)),
        "video": lambda: Media(videos=(Video(pixels, 2.0),)),
        "heard video": lambda: Media(videos=(Video(pixels[..., :-4], 2.0, np.zeros(1, np.float32)),)),
    }[kind]()


@pytest.mark.parametrize("kind", ["sound", "image", "grey image", "video", "heard video"])
async def test_media_up_to_the_bound_travel_with_their_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: "a reference")
    largest, larger = (
        OmniRequest("r", "", of_bytes(kind, size)) for size in (MAX_CARRIED_BYTES, MAX_CARRIED_BYTES + 4)
    )
    async with staged(largest) as sent:
        assert not sent.has_stored_media and sent.request.media == Media()
        entry = sent.with_carried_media(sent.request)
    assert entry.media.size_bytes == MAX_CARRIED_BYTES
    assert len(pickle.dumps(entry, protocol=5)) < MAX_VALUE_BYTES  # and so by value
    async with staged(larger) as sent:
        assert sent.has_stored_media and sent.request.media == Media()
        assert sent.with_carried_media(sent.request) is sent.request


async def test_carried_media_are_a_copy_and_let_go_with_the_request() -> None:
    media = all_kinds_small()
    counted = [weakref.ref(array) for array in (*media.audios, media.videos[0].frames)]
    async with staged(OmniRequest("r", "", media)) as sent:
        entry = sent.with_carried_media(sent.request)
        assert_same(entry.media, media)
        del media
        assert [each() for each in counted] == [None, None]  # what a decoder made is not in use any more
        carried = [weakref.ref(array) for array in entry.media.audios]
        del entry
        assert carried[0]() is not None
    assert carried[0]() is None and sent.with_carried_media(sent.request).media == Media()


@pytest.mark.parametrize(("mode", "bytes_a_pixel"), [("RGB", 3), ("L", 1), ("F", 4), ("I", 4)])
def test_pictures_count_as_they_travel(mode: str, bytes_a_pixel: int) -> None:
    assert Media(images=(Image.new(mode, (20, 30)),)).size_bytes == 20 * 30 * bytes_a_pixel


async def test_media_of_a_request_that_has_ended_are_not_kept() -> None:
    incoming, sent = IncomingMedia(), Media().as_arrays()
    with incoming.expecting("r"):
        incoming.bring("r", sent)
        incoming.bring("r", all_kinds().as_arrays())  # once only
        assert await incoming.take("r") is sent
        assert not incoming._expected  # taken media lie in the store for nobody here
    with incoming.expecting("r"):
        incoming.bring("r", sent)
    incoming.bring("r", sent)
    assert not incoming._expected


class Calls:
    """A stage that is called."""

    def __init__(self) -> None:
        self.brought: list[tuple[object, ...]] = []

    async def call(self, method: str, *args: object, replica_id: str, wait_s: float | None) -> None:
        self.brought.append((method, *args, replica_id))


async def test_media_are_brought_to_each_run_and_let_go_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference:
        """Of an object in the store, which lives as long as this does."""

    monkeypatch.setattr(ray, "put", lambda value: Reference())
    calls = Calls()
    async with staged(OmniRequest("r", "", all_kinds())) as sent:
        assert sent.has_stored_media and sent.request.media == Media()
        for name in ("r", "r-again1"):
            await sent.bring_media(cast(RemoteStage, calls), Ticket(name, f"a replica for {name}"))
    said = [(method, name, replica) for method, name, _, replica in calls.brought]
    assert said == [("bring", "r", "a replica for r"), ("bring", "r-again1", "a replica for r-again1")]
    lives, again = (weakref.ref(brought[2]) for brought in calls.brought)
    assert lives is again
    calls.brought.clear()
    async with asyncio.timeout(60):  # the thread that put them there ends its work a moment later
        while gc.collect() or lives() is not None:
            await asyncio.sleep(0.01)


class FullStage:
    """A stage in whose store nothing has room."""

    async def call(self, method: str, *args: object, replica_id: str, wait_s: float | None) -> None:
        with named_failures(replica_id):
            raise ObjectStoreFullError


async def test_an_error_that_is_kept_holds_no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference:
        pass

    reference = Reference()
    lives = weakref.ref(reference)
    sent = StagedRequest(OmniRequest("r", ""), cast("ray.ObjectRef", reference))
    del reference
    with pytest.raises(StoreFull) as kept:
        await sent.bring_media(cast(RemoteStage, FullStage()), Ticket("r", "a replica"))
    sent.drop_media()
    assert lives() is None and kept.value.__cause__ is None
