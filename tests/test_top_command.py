"""`omni-cluster top` against the toy's API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from omni_cluster.engine import metric_definitions as define
from omni_cluster.terminal.scrape import Scrape, Span
from tests.chatting import PATIENCE_S, command, environment, run, toy_app
from tests.server.local import LocalApp
from tests.terminal import CTRL_C, on_terminal

CHAT = "/v1/chat/completions"
CELL = re.compile(r"[│┃|]")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    with toy_app(tmp_path_factory.mktemp("toy")) as app:
        yield app


def lines_of(printed: Sequence[str]) -> dict[str, dict[str, str]]:
    """The tables' lines by their first cell, each by its columns."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in printed:
        cells = [cell.strip() for cell in CELL.split(line)][1:-1]
        if cells and cells[0] in ("stage", "endpoint"):
            names = cells
        elif len(cells) > 1 and names:
            found[cells[0]] = dict(zip(names, cells, strict=True))
    return found


def ask(toy: LocalApp, text: str = "Good morning") -> None:
    body = {"model": "preset:tiny", "messages": [{"role": "user", "content": text}], "stream": True}
    answer = toy.client.post(CHAT, json=body | {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}})
    assert answer.status_code == 200 and "[DONE]" in answer.text


def test_one_view_has_what_stages_and_endpoints_did(toy: LocalApp) -> None:
    for _ in range(3):
        ask(toy)
    done = run("top", "--url", toy.url, "--once", "--every", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first == f"preset:tiny at {toy.url}: ready; 0 requests run, 0 wait, 0 sessions"
    lines = lines_of(others)
    for stage in ("text", "codes", "sound"):
        assert {"replicas": "1", "running": "0", "waiting": "0", "failed": "0"}.items() <= lines[stage].items()
        assert float(lines[stage]["ended/s"]) == 0
    assert lines[CHAT]["ended"] == lines[CHAT]["streams"] == "3" and lines[CHAT]["refused"] == "0"
    assert lines["/metrics"]["in flight"] == "1"


def test_views_follow_what_happens_until_ctrl_c(toy: LocalApp, tmp_path: Path) -> None:
    with on_terminal(command("top", "--url", toy.url, "--every", "0.5"), tmp_path, environment()) as terminal:
        terminal.until(lambda: "text" in lines_of(terminal.lines), PATIENCE_S)

        def is_counted() -> bool:
            ask(toy)
            stage = lines_of(terminal.lines).get("sound", {})
            return stage.get("sound s/s", "-") not in ("-", "0.0") and stage["ended/s"] != "0.0"

        terminal.until(is_counted, PATIENCE_S)
        terminal.press(CTRL_C)
        assert terminal.end(PATIENCE_S) == 0
        assert not any("Traceback" in line for line in terminal.lines)


def test_a_server_that_is_none_is_one_sentence() -> None:
    done = run("top", "--url", "http://127.0.0.1:1", "--once")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("omni-cluster: http://127.0.0.1:1 does not answer (")


@pytest.mark.parametrize("key", ["sk-schlüssel-0123456789", "\ufeffsk-first-0123456789", "sk-first-\x000123456789"])
def test_a_key_that_no_header_carries_is_told_by_its_file_and_not_shown(
    toy: LocalApp, key: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"# mine\n{key}\n")
    done = run("top", "--url", toy.url, "--once", "--key-file", str(tmp_path / "keys"))
    told = f"omni-cluster: the first key of {tmp_path / 'keys'} is none; use printable ASCII without spaces.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def scrape(at_s: float, **tokens: float) -> Scrape:
    """Of replicas of the stage text."""
    lines = [f"{define.SCRAPED_AT.name} {at_s}"]
    lines += [f'{define.TOKENS.name}{{stage="text",replica="{name}"}} {count}' for name, count in tokens.items()]
    lines += [f'{define.RUNNING.name}{{stage="text",replica="{name}"}} 1' for name in tokens]
    return Scrape.of("\n".join(lines) + "\n")


def test_a_rate_is_of_the_time_between_and_a_replica_that_ends_takes_nothing_away() -> None:
    span = Span(scrape(10, a=100, b=1000), scrape(12, a=110, c=4))
    assert span.rate(define.TOKENS.name, stage="text") == 7
    assert span.rate(define.TOKENS.name, stage="other") == 0
    assert span.now.replicas("text") == span.now.total(define.RUNNING.name) == 2
    assert span.now.values(define.RUNNING, "stage") == ["text"]
    assert Span(span.now, span.now).rate(define.TOKENS.name) is None
