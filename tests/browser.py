"""A headless Chromium with a microphone that plays a file: what a page shows, asks for, and sounds."""

from __future__ import annotations

import base64
import json
import re
import shutil
import wave
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import numpy as np
import numpy.typing as npt
import pytest
from playwright.async_api import Page, WebSocket, async_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 120_000
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
GRAVE = ("serious", "critical")
WIDTHS = {"phone": 390, "desk": 1200}
HEIGHT = 844
RATE_HZ = 24_000
LOCAL = ("blob:", "data:")
"""Addresses of what the page has already."""

RECORD = """
globalThis.microphones = [];
const getUserMedia = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
navigator.mediaDevices.getUserMedia = async (wanted) => {
  const stream = await getUserMedia(wanted);
  microphones.push(...stream.getTracks());
  return stream;
};
globalThis.recorded = [];
const connect = AudioNode.prototype.connect;
AudioNode.prototype.connect = function (to, ...rest) {
  if (to instanceof AudioDestinationNode) {
    const recorder = new AudioWorkletNode(this.context, "microphone", { numberOfOutputs: 0 });
    recorder.port.onmessage = ({ data }) => recorded.push(data.samples);
    connect.call(this, recorder);
  }
  return connect.call(this, to, ...rest);
};
"""
"""Microphones can be muted. What goes to the speakers is kept, by the page's own processor for microphones."""
RECORDED = """() => {
  const bytes = recorded.flatMap((samples) => [...new Uint8Array(samples.buffer)]);
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}"""
SILENT = "recorded.at(-1).every((sample) => sample === 0)"
DROP = """([name, type, data]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
  document.dispatchEvent(new DragEvent("dragover", { dataTransfer: files, bubbles: true, cancelable: true }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
}"""

Samples = npt.NDArray[np.int16]


class Tab:
    """A page that is open. `asked`: every address that it asked for; `complaints`: what it said on the console."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.sent: list[str] = []
        self.told: list[str] = []
        """Messages on WebSockets."""
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("websocket", self._watch)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))

    def _watch(self, socket: WebSocket) -> None:
        self.asked.append(socket.url.replace("ws", "http", 1))
        socket.on("framesent", lambda text: self.sent.append(str(text)))
        socket.on("framereceived", lambda text: self.told.append(str(text)))

    async def ask(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).fill(text)
        await self.until("!document.getElementById('send').disabled")  # it knows the model
        await self.page.keyboard.press("Enter")

    async def drop(self, name: str, media_type: str, data: bytes) -> None:
        await self.page.evaluate(DROP, [name, media_type, base64.b64encode(data).decode()])

    async def mute(self, is_muted: bool) -> None:
        """Of the microphone."""
        await self.page.evaluate("(muted) => microphones.forEach((each) => (each.enabled = !muted))", is_muted)

    async def until(self, condition: str) -> None:
        """Until the page's expression is true."""
        await self.page.wait_for_function(f"() => {condition}")

    async def answered(self, count: int = 1) -> None:
        """Until so many answers are whole, and nothing sounds."""
        whole = f"document.querySelectorAll('.answer[aria-busy=false]').length >= {count}"
        await self.until(f"{whole} && document.getElementById('stop').hidden")

    async def texts(self, kind: str) -> list[str]:
        return await self.page.locator(f".{kind} .text").all_text_contents()

    async def recorded(self) -> Samples:
        """All that the speakers got since the page was opened, between the first sample that is not 0 and the last."""
        await self.until(f"recorded.length > {await self.page.evaluate('recorded.length')} + 2 && {SILENT}")
        samples = np.frombuffer(base64.b64decode(await self.page.evaluate(RECORDED)), np.int16)
        sounding = np.flatnonzero(samples)
        return samples[sounding[0] : sounding[-1] + 1] if len(sounding) else samples[:0]

    def answers(self) -> list[Samples]:
        """What the server sent of each spoken answer of a conversation by voice, in the order of their beginnings."""
        sound: dict[str, bytes] = {}
        for event in map(json.loads, self.told):
            if event["type"] == "response.output_audio.delta":
                name = event["response_id"]
                sound[name] = sound.get(name, b"") + base64.b64decode(event["delta"])
        return [np.frombuffer(each, np.int16) for each in sound.values()]

    async def faults(self) -> list[str]:
        """What axe-core finds that is serious."""
        await self.page.evaluate(AXE)
        found = await self.page.evaluate("axe.run()")
        return [
            f"{each['id']}: {[node['html'] for node in each['nodes']]}"
            for each in found["violations"]
            if each["impact"] in GRAVE
        ]

    async def show(self, folder: Path, name: str, *, scheme: Any = "light", width: int = 1200) -> None:
        """Keeps a picture of the page as a person with such a screen sees it."""
        await self.page.emulate_media(color_scheme=scheme)
        await self.page.set_viewport_size({"width": width, "height": HEIGHT})
        await self.page.screenshot(path=folder / f"{name}.png")


@asynccontextmanager
async def tab(
    url: str, speech: Path | None = None, *, repeats: bool = False, server: str | None = None
) -> AsyncIterator[Tab]:
    """The page at `url`; `speech`: a WAV file that its microphone has once, or time and again.

    Nothing else than `url` may be asked, and the `server` of a page that came from elsewhere.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("Chromium is not installed; Debian has it as chromium.")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=program, args=options(speech, repeats))
        context = await started.new_context(permissions=["microphone"])
        await context.add_init_script(RECORD)
        opened = Tab(await context.new_page(), url)
        await opened.page.goto(url)
        yield opened
        assert foreign(opened.asked, url, server or url) == [] and opened.complaints == []
        await started.close()


def options(speech: Path | None, repeats: bool) -> Sequence[str]:
    fakes = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    spoken = [] if speech is None else [f"--use-file-for-fake-audio-capture={speech}{'' if repeats else '%noloop'}"]
    # As root, which containers often are, Chromium has no sandbox.
    return ["--no-sandbox", "--autoplay-policy=no-user-gesture-required", *fakes, *spoken]


def foreign(asked: Sequence[str], *urls: str) -> list[str]:
    """Addresses of other servers."""
    ours = "|".join(map(re.escape, urls))
    return [each for each in asked if not re.match(rf"({ours})(/|$)", each) and not each.startswith(LOCAL)]


def is_of(played: Samples, answers: Sequence[Samples]) -> bool:
    """Whether it is the beginning of each answer in turn, and nothing else; silence counts nowhere."""
    if not answers:
        return len(played) == 0
    answer = answers[0][answers[0] != 0]
    size = min(len(played), len(answer))
    differing = np.flatnonzero(played[:size] != answer[:size])
    same = int(differing[0]) if len(differing) else size
    # The next one may go on, by chance, as this one would have done.
    return any(is_of(played[cut:], answers[1:]) for cut in range(same, max(-1, same - 4), -1))


def written(path: Path, samples: Samples, rate_hz: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(samples.tobytes())
    return path
