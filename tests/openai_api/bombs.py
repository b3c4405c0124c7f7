"""Media that are harmless, long or hostile, in bodies."""

from __future__ import annotations

import base64
import functools
import io
import zlib
from typing import Any

import av
from PIL import Image

from tests.openai_api.films import video_file


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def frames(*urls: str) -> dict[str, Any]:
    return {"type": "video", "video": list(urls)}


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"}}


def png_claiming(width: int, height: int) -> str:
    """A header alone: what it says is all that anyone can know before decoding."""
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x01\0\0\0\0"
    data = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + head + zlib.crc32(head).to_bytes(4, "big")
    return "data:image/png;base64," + base64.b64encode(data + b"\0\0\0\4IDAT" + bytes(8)).decode()


def png_bomb(width: int, height: int) -> str:
    """Some kilobytes that are a whole picture."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@functools.cache
def long_video(repeats: int = 298) -> dict[str, Any]:
    """The same second again and again, as long as a video may be: no decoder is done before it is seen to work."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        written: Any = None
        data = video_file(frames=100, rate=100, size=(640, 480))
        for number in range(repeats):
            with av.open(io.BytesIO(data)) as second:
                stream = second.streams.video[0]
                written = written or output.add_stream_from_template(stream)
                for packet in filter(lambda packet: packet.size, second.demux(stream)):
                    later = int(number / packet.time_base)
                    packet.pts, packet.dts, packet.stream = packet.pts + later, packet.dts + later, written
                    output.mux(packet)
    return video(file.getvalue())
