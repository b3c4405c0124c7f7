"""Prompts with media over HTTP: seconds until the first text and the first sound, of each kind and of all at once.

    python -m benchmarks.media_prompts OUT.json [--url URL] [--requests 4] [--codec-tokens 512]

Kinds: text alone, 2, 10 and 30 s of sound, a picture of 640 x 480, one of 1920 x 1080, eight of the first size, 10 s of
video, the same with its sound, and all three media in one message. Media are noise of their own for each request, so
that no cache answers them; the first request of each kind is not counted. Then two of each kind come at once.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import datetime
import io
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
from PIL import Image

from omni_cluster.bench.http_client import HttpClient, first_model
from omni_cluster.bench.load import Load
from omni_cluster.bench.machine import this_machine
from omni_cluster.bench.record import RequestRecord
from omni_cluster.openai_api.audio import wav_bytes

RATE_HZ, FRAMES_PER_S = 16_000, 4
SMALL, LARGE, FILM = (640, 480), (1920, 1080), (320, 240)
Part = dict[str, Any]
Parts = Callable[[int], list[Part]]
"""Of the message of a request, by its number."""


def url_of(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def noise(seconds: float, seed: int) -> np.ndarray:
    """Float32 at 16 kHz."""
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE_HZ)) * 0.1).astype(np.float32)


def pixels(size: tuple[int, int], seed: int) -> np.ndarray:
    """Squares of 32 pixels, uint8 `[height, width, 3]`: noise of single pixels would be the upload that is measured."""
    width, height = size
    squares = np.random.default_rng(seed).integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), np.uint8)
    return squares.repeat(32, 0).repeat(32, 1)[:height, :width]


def sound(seconds: float, seed: int) -> Part:
    data = base64.b64encode(wav_bytes(noise(seconds, seed), RATE_HZ)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def picture(size: tuple[int, int], seed: int) -> Part:
    file = io.BytesIO()
    Image.fromarray(pixels(size, seed)).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": url_of(file.getvalue(), "image/png")}}


def video(seconds: int, seed: int, *, has_sound: bool = False) -> Part:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        track = output.add_stream("aac", rate=RATE_HZ, layout="mono") if has_sound else None
        film = output.add_stream("libx264", rate=FRAMES_PER_S, options={"preset": "ultrafast"})
        film.width, film.height, film.pix_fmt = *FILM, "yuv420p"
        for number in range(seconds * FRAMES_PER_S):
            output.mux(film.encode(av.VideoFrame.from_ndarray(pixels(FILM, 1000 * seed + number), format="rgb24")))
        output.mux(film.encode(None))
        if track is not None:
            frame = av.AudioFrame.from_ndarray(noise(seconds, seed)[None], format="fltp", layout="mono")
            frame.sample_rate = RATE_HZ
            for piece in av.AudioResampler("fltp", "mono", RATE_HZ, frame_size=1024).resample(frame):
                output.mux(track.encode(piece))
            output.mux(track.encode(None))
    return {"type": "video_url", "video_url": {"url": url_of(file.getvalue(), "video/mp4")}}


KINDS: Mapping[str, Parts] = {
    "text": lambda number: [],
    "2 s of sound": lambda number: [sound(2, number)],
    "10 s of sound": lambda number: [sound(10, number)],
    "30 s of sound": lambda number: [sound(30, number)],
    "a picture of 640 x 480": lambda number: [picture(SMALL, number)],
    "a picture of 1920 x 1080": lambda number: [picture(LARGE, number)],
    "8 pictures of 640 x 480": lambda number: [picture(SMALL, 8 * number + i) for i in range(8)],
    "10 s of video": lambda number: [video(10, number)],
    "10 s of video with sound": lambda number: [video(10, number, has_sound=True)],
    "sound, picture and video": lambda number: [sound(5, number), picture(SMALL, number), video(5, number)],
}


class MediaClient(HttpClient):
    """Asks about media: request `number` sends those that `kinds` has for it, by turns, and a sentence."""

    kinds: Sequence[str] = ("text",)

    def body(self, number: int) -> dict[str, Any]:
        body = super().body(number)
        kind = self.kinds[number % len(self.kinds)]
        text = {"type": "text", "text": f"What is there to hear and to see in number {number}?"}
        body["messages"] = [{"role": "user", "content": [*KINDS[kind](number), text]}]
        return body | ({"use_audio_in_video": True} if "with sound" in kind else {})


async def measure(url: str, requests: int, codes: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        client = MediaClient(http, await first_model(http, url), Load(codec_tokens=codes))
        cells = []
        for first, kind in enumerate(KINDS):
            client.kinds = (kind,)
            records = [await client.ask(100 * first + number) for number in range(requests + 1)]
            cells.append(told(cell(kind, records[1:])))
        client.kinds = tuple(KINDS)
        together = await asyncio.gather(*(client.ask(10_000 + number) for number in range(2 * len(KINDS))))
        return [*cells, told(cell("two of each at once", together))]


def cell(kind: str, records: Sequence[RequestRecord]) -> dict[str, Any]:
    done = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    return {
        "kind": kind,
        "requests": len(records),
        "failed": len(errors),
        "first_failure": errors[0] if errors else None,
        "prompt_tokens": statistics.median(record.prompt_tokens for record in done) if done else None,
        "first_text_s": quantiles([record.text_s[0] for record in done]),
        "first_audio_s": quantiles([record.audio[0].at_s for record in done]),
        "answer_s": quantiles([record.total_s for record in done]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 4), "max": round(max(values), 4)} if values else {}


def told(made: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(made), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--codec-tokens", type=int, default=512)
    asked = parser.parse_args()
    cells = asyncio.run(measure(asked.url, asked.requests, asked.codec_tokens))
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.media_prompts", *sys.argv[1:]]),
        "machine": asdict(this_machine("client")),
        "cells": cells,
    }
    asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
