"""Seconds until an application is ready, start after start, and until a stage that is killed is heard again.

    python -m benchmarks.starts CONFIG [--model FOLDER] [--times 3] [--kill talker]

Each start is of a Ray of its own, from the call on; the lines say when each stage came to another step. The first one
finds what `cache_dir` holds. `--kill` ends the processes of the stage's replicas, at once, and sends a request.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import yaml

from omni_cluster.bench.http_client import http_client
from omni_cluster.bench.load import Load
from omni_cluster.bench.record import RequestRecord
from omni_cluster.cluster.local import LocalCluster

PATIENCE_S = 600.0


class Steps:
    """Prints what each deployment does as it changes, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._states: dict[str, str] = {}

    def add(self, states: Mapping[str, str]) -> None:
        for name, state in states.items():
            if self._states.get(name) != state:
                self.say(f"{name} {state}")
        self._states = dict(states)

    def say(self, words: str) -> None:
        print(f"{time.monotonic() - self._began_s:7.1f} {words}", flush=True)


async def asked(url: str, number: int) -> RequestRecord:
    async with http_client(url, Load(), PATIENCE_S) as client:
        return await client.ask(number)


def kill(stage: str) -> int:
    """Ends all replicas of the stage by SIGKILL; returns how many."""
    replicas = [
        process
        for process in psutil.Process().children(recursive=True)
        if any(f"ServeReplica:default:{stage}" in word for word in process.cmdline())
    ]
    for replica in replicas:
        replica.kill()
    return len(replicas)


def heard(record: RequestRecord) -> str:
    if record.error is not None:
        return record.error
    return f"first text after {record.text_s[0]:.2f} s, first sound after {record.audio[0].at_s:.2f} s"


def start(config: Path, killed: str | None) -> None:
    steps = Steps()
    with LocalCluster(config) as cluster:
        cluster.wait_ready(PATIENCE_S, on_change=steps.add)
        steps.say("ready")
        steps.say(f"a request: {heard(asyncio.run(asked(cluster.base_url, 0)))}")
        steps.say(f"another: {heard(asyncio.run(asked(cluster.base_url, 1)))}")
        if killed is not None:
            steps.say(f"{kill(killed)} replicas of {killed} are killed")
            steps.say(f"a request at once: {heard(asyncio.run(asked(cluster.base_url, 2)))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", help="a checkpoint in the place of the configuration's")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kill", metavar="STAGE", help="after the last start")
    options = parser.parse_args()
    config = yaml.safe_load(options.config.read_text())
    config |= {"model": options.model} if options.model else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        for number in range(options.times):
            print(f"start {number + 1}", flush=True)
            start(path, options.kill if number == options.times - 1 else None)


if __name__ == "__main__":
    main()
