"""Forms with a sound, as clients send them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile

BOUNDARY = "xX-the-boundary"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
RATE_HZ = 16_000


def sound(seconds: float = 0.5, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    samples = (np.sin(np.arange(int(seconds * RATE_HZ)) * 0.2) * 20_000).astype(np.int16)
    soundfile.write(file, samples, RATE_HZ, format=kind)
    return file.getvalue()


def form(*fields: tuple[str, Any], file: bytes | None = None) -> bytes:
    """The fields in their order, and the file behind them."""
    parts = [(f'name="{name}"', value if isinstance(value, bytes) else str(value).encode()) for name, value in fields]
    if file is not None:
        parts.append(('name="file"; filename="a.bin"\r\nContent-Type: application/octet-stream', file))
    made = b"".join(
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    )
    return made + f"--{BOUNDARY}--\r\n".encode()
