"""What is remembered of a start, and what its lines say."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_cluster.cluster import starting
from omni_cluster.cluster.starting import Starting, StepTimes


def test_a_step_s_time_is_what_it_took_last(tmp_path: Path) -> None:
    file = tmp_path / "not there yet" / "stage.json"
    assert StepTimes(file).usual_s("imports") is None
    for seconds in (5.0, 7.25):
        StepTimes(file).remember("imports", seconds)
    StepTimes(file).remember("starts", 1.0)
    assert (StepTimes(file).usual_s("imports"), StepTimes(file).usual_s("starts")) == (7.2, 1.0)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"imports": "long"}', "\x00"])
def test_a_file_that_says_nothing_is_no_error_and_is_written_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "stage.json").write_text(text)
    times = StepTimes(tmp_path / "stage.json")
    assert times.usual_s("imports") is None
    times.remember("imports", 2.0)
    assert times.usual_s("imports") == 2.0


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    StepTimes(tmp_path / "file" / "stage.json").remember("imports", 2.0)
    assert (tmp_path / "file").read_text() == ""


def test_replicas_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "stage.json"
    writers = [threading.Thread(target=StepTimes(file).remember, args=("imports", float(n))) for n in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert StepTimes(file).usual_s("imports") in range(16)


def test_a_step_says_how_long_it_usually_takes_and_then_how_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "cache_folder", lambda: tmp_path)
    published, logged = list[str](), list[str]()
    monkeypatch.setattr(starting, "kv_put", lambda _key, said, namespace: published.append(said.decode()))
    monkeypatch.setattr(starting, "logger", SimpleNamespace(info=lambda said, *of: logged.append(said % of)))
    for now_s in ((100.0, 112.3), (200.0, 215.0)):
        monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=iter(now_s).__next__))
        with Starting("talker").step("starts the engine"):
            pass
    assert published == ["starts the engine", "starts the engine, usually 12 s"]
    assert logged == [
        "talker: starts the engine",
        "talker: starts the engine took 12.3 s",
        "talker: starts the engine, usually 12 s",
        "talker: starts the engine took 15.0 s",
    ]
