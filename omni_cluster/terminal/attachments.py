"""Files as parts of a chat's message."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

from omni_cluster.terminal.server import TerminalError

MOST_FILE_BYTES: Final = 48 << 20
"""As base64 it is as much as a server takes that is not configured otherwise."""
MEDIA_TYPES: Final = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "amr": "audio/amr",
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "mp4": "video/mp4",
    "mov": "video/quicktime",
    "webm": "video/webm",
    "mkv": "video/x-matroska",
}
"""By the end of a file's name; other files are text."""


def file_part(path: Path) -> dict[str, Any]:
    """Raises TerminalError."""
    try:
        if (size := path.stat().st_size) > MOST_FILE_BYTES:
            raise TerminalError(f"the file {path} has {size} bytes, but at most {MOST_FILE_BYTES} can be sent.")
        data = path.read_bytes()
    except OSError as error:
        raise TerminalError(f"the file {path} cannot be read ({error.strerror}); name one that can.") from None
    media_type = MEDIA_TYPES.get(path.suffix.lower().removeprefix("."))
    return _text_part(path, data) if media_type is None else media_part(data, media_type)


def media_part(data: bytes, media_type: str) -> dict[str, Any]:
    name = f"{media_type.partition('/')[0]}_url"
    return {"type": name, name: {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


def _text_part(path: Path, data: bytes) -> dict[str, Any]:
    try:
        return {"type": "text", "text": f"{path.name}:\n{data.decode()}"}
    except UnicodeDecodeError:
        known = ", ".join(MEDIA_TYPES)
        raise TerminalError(f"the file {path} is no text; its name should end in one of {known}.") from None
