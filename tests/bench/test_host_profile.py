"""The benchmark of the host's time: what it makes of processes and of py-spy's stacks."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from benchmarks.host_profile import Function, Used, between, cpu_table, function_table, functions, role_of, used
from omni_cluster.bench.result import Cell, Percentiles

TALKER = "ray::ServeReplica:default:talker.generate"


@pytest.mark.parametrize(
    ("lines", "role"),
    [
        ([TALKER, "raylet/raylet"], "talker replica"),
        (["ray::ServeReplica:default:code2wav"], "code2wav replica"),
        (["VLLM::EngineCore", "python -c forkserver", TALKER], "talker engine core"),
        (["VLLM::Worker_TP1", "VLLM::EngineCore", "ray::ServeReplica:default:thinker"], "thinker worker"),
        (["python watchdog_process.py 1 120.0", TALKER], "talker watchdog"),
        (["ray::ProxyActor", "raylet/raylet"], "proxy"),
        (["python -m omni_cluster bench --url http://127.0.0.1:8000"], "client"),
        (["python"], "other"),
    ],
)
def test_a_process_is_called_by_what_it_and_its_parents_run(lines: list[str], role: str) -> None:
    assert role_of(lines) == role


def test_functions_are_counted_as_they_work_and_as_they_call() -> None:
    stacks = ["run (a.py:1);step (b.py:2);copy (c.py:3) 6", "run (a.py:1);step (b.py:2) 3", "wait (d.py:4) 1"]
    assert functions(stacks) == [
        Function("copy (c.py:3)", 6, 6),
        Function("step (b.py:2)", 3, 9),
        Function("wait (d.py:4)", 1, 1),
        Function("run (a.py:1)", 0, 9),
    ]


def test_a_recursion_counts_once_a_stack() -> None:
    assert functions(["f (a.py:1);f (a.py:1);f (a.py:1) 4"]) == [Function("f (a.py:1)", 4, 4)]


def test_a_table_of_functions_has_shares_of_the_time_at_work() -> None:
    head, row, *_ = function_table("talker replica 7", functions(["f (a.py:1) 3", "g (a.py:2) 1"]), 10)
    assert "talker replica 7: at work in 4 of 10 looks" in head
    assert row == " 75.0 %  75.0 %  f (a.py:1)"


def test_time_is_of_the_cell_and_the_client_is_not_the_server_s() -> None:
    before = {1: Used(1, "proxy", 2.0)}
    after = {1: Used(1, "proxy", 5.0), 2: Used(2, "client", 4.0)}
    spent = between(before, after)
    assert spent == [Used(2, "client", 4.0), Used(1, "proxy", 3.0)]
    cell = Cell("open", 1, 10, 0, 30.0, 1.0, 1.0, {"audio_chunks": Percentiles(6, 6, 6, 6)})
    assert cpu_table(spent, cell)[2:] == [
        "| the server | 0.10 | 300.0 | 50.00 |",
        "| proxy | 0.10 | 300.0 | 50.00 |",
        "| client | 0.13 | 400.0 | 66.67 |",
    ]


def test_the_time_of_a_child_process_is_found() -> None:
    turn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", turn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert used(psutil.Process())[child.pid].cpu_s >= 0.19
        child.communicate(b"\n")
