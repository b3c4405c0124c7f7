"""Checks what the boxes of an mp4 or mov file claim, before FFmpeg relies on it."""

from __future__ import annotations

import struct
from collections.abc import Iterator


def check_claims(data: bytes) -> None:
    """ValueError where boxes claim more samples than the file has bytes.

    FFmpeg takes memory for each sample that is claimed before it reads one: 58 bytes, times the edits. It would also
    inflate a compressed header to any size.
    """
    samples = edits = size_bytes = 0
    for kind, body in _boxes_that_claim(data):
        if kind == b"cmov":
            raise ValueError("a compressed header")
        first, second = struct.unpack_from(">4xII", body.ljust(12, b"\0"))
        if kind == b"stsz":
            samples += second
            size_bytes += first * second
        elif kind == b"trun":
            samples += first
        else:
            edits = max(edits, first)
        if max(samples, 1) * max(edits, 1) > len(data) or size_bytes > len(data):
            raise ValueError("more samples than bytes")


def _boxes_that_claim(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and first 12 bytes of each box of samples or edits; found by name, so that no nesting hides one."""
    for start, end in _header_spans(data):
        for kind in (b"stsz", b"trun", b"elst", b"cmov"):
            place = data.find(kind, start, end)
            while place >= 0:
                yield kind, data[place + 4 : place + 16]
                place = data.find(kind, place + 4, end)


def _header_spans(data: bytes) -> Iterator[tuple[int, int]]:
    """Where bytes are that may be headers: all but the media in boxes that are whole."""
    place = 0
    while place + 16 <= len(data):
        size, kind, long_size = struct.unpack_from(">I4sQ", data, place)
        size, least = (long_size, 16) if size == 1 else (size, 8)
        if size < least or place + size > len(data):
            break
        if kind != b"mdat":
            yield place, place + size
        place += size
    yield place, len(data)
