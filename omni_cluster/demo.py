"""`omni-cluster demo`: a cluster on this machine, asked over HTTP as any client would ask it."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from omni_cluster.api_client import (
    CONNECT_TIMEOUT_S,
    BadAnswer,
    Part,
    Refused,
    ServedModel,
    body_of,
    events_of,
    printable,
    refusal,
)
from omni_cluster.config.loader import load_config
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.audio import wav_file
from omni_cluster.types.errors import OmniError
from omni_cluster.types.outputs import StageTimes

if TYPE_CHECKING:
    from omni_cluster.cluster.local import LocalCluster

READY_TIMEOUT_S = 900.0
SPOKEN_QUESTION = Path(__file__).with_name("demo_question.wav")
"""A WAV of 16 kHz: "what is three plus four", said once by espeak-ng, which a user may lack. In a checkout:

    sound = training.speech.question_sound("what is three plus four", Voice("f1", 160, 50), Random(194))
    SPOKEN_QUESTION.write_bytes(omni_cluster.openai_api.audio.wav_bytes(sound, 16_000))
"""
PICTURE_QUESTION = "What is in the picture?"
PICTURE_SIDE = 112
FINER = 3
"""The picture is drawn so many times larger, and made smaller: its edges are smooth."""

Body = dict[str, Any]


class DemoError(OmniError):
    """The demo did not get what it asked for."""


def run_demo(config: Path | None, port: int, out: Path, *, keep: bool = False) -> None:
    """Starts the cluster of `config` (None: the embedded default), asks it by voice and about a picture, stops it; with
    `keep` once told to.

    What is asked and answered goes to `out`. Raises OmniError, after everything was shut down, when the cluster does
    not come up, refuses, or answers without text or sound.
    """
    console = Console(highlight=False)
    settings = load_config(config, known_families=known_families())
    folder = made_folder(out)
    # Ray is needed here alone: bad input is refused without it.
    from omni_cluster.cluster.local import LocalCluster, end_on_signals

    local = LocalCluster(config=config, port=port)  # refuses what it cannot start
    end_on_signals()
    with started(local, console) as cluster:
        console.print(f"serving at {cluster.base_url}", soft_wrap=True)
        timeout = httpx.Timeout(settings.limits.request_timeout_s, connect=CONNECT_TIMEOUT_S)
        # A proxy that the environment names must not come between this process and its own machine.
        with httpx.Client(base_url=cluster.base_url, timeout=timeout, trust_env=False) as http:
            converse(http, settings.default_voice, folder, console)
        say_address(cluster.base_url, console, keep)
        if keep:
            threading.Event().wait()  # for a signal, whose handler raises


@contextmanager
def started(local: LocalCluster, console: Console) -> Iterator[LocalCluster]:
    """The cluster once it serves; shows its start. Raises OmniError."""
    from omni_cluster.cluster.start_table import start_table

    with ExitStack() as running:
        with start_table(console) as table:
            table.update({"Ray": "starts its processes"})
            running.enter_context(local)
            table.update({"Ray": "ready"})
            local.wait_ready(READY_TIMEOUT_S, table.update)
        yield local


def say_address(url: str, console: Console, keep: bool) -> None:
    """Of the page to talk to the model."""
    if keep:
        console.print(f"\nTalk to it at {url}/ in a browser; Ctrl-C stops it.", soft_wrap=True)
    else:
        console.print(f"\nWith --keep it stays up, and {url}/ is a page to talk to it.", soft_wrap=True)


def made_folder(out: Path) -> Path:
    """`out`, made where it is not there. Raises DemoError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"the folder {out} cannot be made ({error.strerror}); name one that can be written.") from None
    return out


# ------------------------------------------------------------ the questions


def question_picture() -> Image.Image:
    """A red circle, RGB."""
    side = PICTURE_SIDE * FINER
    image = Image.new("RGB", (side, side), "white")
    left, top, width = side // 4, side // 5, side // 2
    ImageDraw.Draw(image).ellipse((left, top, left + width, top + width), fill=(215, 25, 30))
    return image.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BOX)


def png_bytes(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def spoken_body(model: str, voice: str | None, sound: bytes) -> Body:
    """A question that is a WAV."""
    wav = base64.b64encode(sound).decode("ascii")
    return _body(model, voice, [{"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}])


def picture_body(model: str, voice: str | None, picture: bytes) -> Body:
    """A question about a PNG."""
    png = base64.b64encode(picture).decode("ascii")
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}
    return _body(model, voice, [image, {"type": "text", "text": PICTURE_QUESTION}])


def _body(model: str, voice: str | None, content: list[Body]) -> Body:
    """Whose answer is streamed text and sound; `voice` None: the server's default."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": voice, "format": "wav"},
        "stream": True,
    }


# -------------------------------------------------------------- the answers


@dataclass(slots=True)
class StreamedAnswer:
    """What came of one streamed answer. `pcm`: 16-bit mono at 24 kHz; times are seconds since the request was sent."""

    text: str = ""
    pcm: bytes = b""
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float = 0.0
    stages: dict[str, StageTimes] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any], now_s: float) -> str:
        """Takes one event of the stream; returns the text that came with it."""
        part = Part.of(event)
        for name, times in part.stages.items():
            self.stages[name] = StageTimes(times["first_s"], times["last_s"], int(times["tokens"]))
        if part.text:
            self.text += part.text
            self.first_text_s = now_s if self.first_text_s is None else self.first_text_s
        if part.sound:
            self.pcm += part.sound
            self.first_audio_s = now_s if self.first_audio_s is None else self.first_audio_s
        return part.text


def first_model(http: httpx.Client) -> ServedModel:
    """The model that is served. Raises DemoError."""
    with _told(http):
        response = http.get("/v1/models")
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.content)
        return ServedModel.of(body_of(response.content))


def ask(http: httpx.Client, body: Body, on_text: Callable[[str], None]) -> StreamedAnswer:
    """Streams one answer, its text to `on_text` as it comes. Raises DemoError."""
    answer, started_s = StreamedAnswer(), time.perf_counter()
    with _told(http), http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.read())
        for event in events_of(response.iter_lines()):
            on_text(answer.add(event, time.perf_counter() - started_s))
    answer.total_s = time.perf_counter() - started_s
    return answer


def written_down(http: httpx.Client, model: str, sound: bytes) -> str:
    """What the model hears in a WAV. Raises DemoError."""
    files = {"file": (SPOKEN_QUESTION.name, sound, "audio/wav")}
    with _told(http):
        response = http.post("/v1/audio/transcriptions", data={"model": model}, files=files)
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, response.content)
        return str(body_of(response.content)["text"])


@contextmanager
def _told(http: httpx.Client) -> Iterator[None]:
    """What is no answer is a DemoError."""
    try:
        yield
    except Refused as refused:
        raise DemoError(f"the server says: {refused}") from None
    except BadAnswer as bad:
        raise DemoError(f"{str(bad).removesuffix('.')}; the server's log says why.") from None
    except httpx.HTTPError as error:
        why = f"the server at {http.base_url} broke off ({type(error).__name__}); its log says why."
        raise DemoError(why) from None


# --------------------------------------------------------- the conversation


def converse(http: httpx.Client, voice: str | None, folder: Path, console: Console) -> None:
    """Asks by voice, then about a picture; all that was asked and answered is kept in `folder`.

    Raises DemoError when text or sound stays out.
    """
    model = first_model(http)
    console.print(f"model: {model.name}\n", markup=False, soft_wrap=True)
    sound, picture = SPOKEN_QUESTION.read_bytes(), png_bytes(question_picture())
    (folder / "question.wav").write_bytes(sound)
    (folder / "picture.png").write_bytes(picture)
    console.print("> [question.wav]", markup=False)
    console.print(f"transcript: {printable(written_down(http, model.name, sound))}", markup=False, soft_wrap=True)
    answer = ask_aloud(http, spoken_body(model.name, voice, sound), console)
    keep_sound(answer, folder / "answer.wav", model.sample_rate_hz, console)
    console.print(f"> [picture.png] {PICTURE_QUESTION}", markup=False, soft_wrap=True)
    seen = ask_aloud(http, picture_body(model.name, voice, picture), console)
    keep_sound(seen, folder / "picture.wav", model.sample_rate_hz, console)
    console.print(client_table(answer))
    console.print(stage_table(answer))


def ask_aloud(http: httpx.Client, body: Body, console: Console) -> StreamedAnswer:
    console.print("answer: ", end="")
    answer = ask(http, body, lambda text: show(text, console))
    console.print()
    if not answer.text or not answer.pcm:
        missing = "sound" if answer.text else "text"
        raise DemoError(f"the answer to a question has no {missing}; the server's log says why.")
    return answer


def keep_sound(answer: StreamedAnswer, path: Path, rate_hz: int, console: Console) -> None:
    path.write_bytes(wav_file(answer.pcm, rate_hz))
    seconds = len(answer.pcm) / 2 / rate_hz
    console.print(f"sound: {path}, {seconds:.2f} s at {rate_hz} Hz\n", markup=False, soft_wrap=True)


def show(text: str, console: Console) -> None:
    console.print(printable(text), end="", markup=False, soft_wrap=True)


def client_table(answer: StreamedAnswer) -> Table:
    table = Table("as the client saw it", "seconds")
    table.add_row("first text", _seconds(answer.first_text_s))
    table.add_row("first sound", _seconds(answer.first_audio_s))
    table.add_row("whole answer", _seconds(answer.total_s))
    return table


def stage_table(answer: StreamedAnswer) -> Table:
    table = Table("stage", "first output, s", "last output, s", "tokens")
    for name, times in answer.stages.items():
        table.add_row(name, _seconds(times.first_s), _seconds(times.last_s), str(times.tokens))
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
