"""Bodies that keep decoders at work."""

from __future__ import annotations

from typing import Any

from tests.http_app import MODEL
from tests.openai_api.bombs import frames, image, png_bomb, png_claiming, video
from tests.openai_api.films import box_place, patched, video_file

HELLO = [{"type": "text", "text": "Hello."}]


def asking(*parts: Any, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, *HELLO]}]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, **options}


def hostile_mp4() -> dict[str, Any]:
    """FFmpeg would take gigabytes for the samples that its table claims."""
    data = video_file()
    place, chunk = box_place(data, b"stsz") + 4, box_place(data, b"stsc") + 12
    claims = (80_000_000).to_bytes(4, "big")
    return video(patched(patched(data, place, (1).to_bytes(4, "big") + claims), chunk, claims))


BOMBS: dict[str, tuple[list[dict[str, Any]], int, str]] = {
    "a picture": ([image(png_claiming(20_000, 20_000))], 413, "image_too_large"),
    "pictures together": ([image(png_bomb(8_000, 8_000))] * 4, 413, "media_too_large"),
    "a list of pictures": ([frames(*[png_bomb(3_000, 3_000)] * 16)], 413, "video_frame_too_large"),
    "a table of samples": ([hostile_mp4()], 400, "bad_video"),
}
