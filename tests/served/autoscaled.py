"""A cluster to which Ray's autoscaler adds nodes, and takes them away again: each is some processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.util.state import list_nodes

from tests.processes import command_line, kill
from tests.served.app import PATIENCE_S, ROOT, STORE_BYTES, TOYS, TRACING, forget_killed_cluster, wait_until

SHIPPED = ROOT / "deploy" / "ray_cluster_aws.yaml"
HEAD = "head"
CARD = "card"
"""A resource of Ray in place of a GPU: the machine may have none, and stages look at those that they are given."""
IDLE_MINUTES = 0.1
RUNS = "This command will now block forever"
ENVIRONMENT = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",  # as `ray up` sets it
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}


def shipped_types() -> dict[str, dict[str, Any]]:
    """Node types of the file for AWS but the head's: their labels, how many there may be, and their cards."""
    types: dict[str, dict[str, Any]] = yaml.safe_load(SHIPPED.read_text())["available_node_types"]
    return {name: each for name, each in types.items() if name != HEAD}


def bootstrap_config(gcs_address: str) -> dict[str, Any]:
    """What `ray up` makes of the file for AWS, for nodes of this machine. None is there before it is needed."""
    shipped: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    provider = {
        "type": "external",
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
        "disable_node_updaters": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "gcs_address": gcs_address,
    }
    types = {name: _of_this_machine(each) for name, each in shipped_types().items()}
    types[FAKE_HEAD_NODE_TYPE] = _of_this_machine(shipped["available_node_types"][HEAD])
    return shipped | {
        "provider": provider,
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": types,
        "idle_timeout_minutes": IDLE_MINUTES,
        "cluster_synced_files": [],
    }


def _of_this_machine(node_type: Mapping[str, Any]) -> dict[str, Any]:
    """Ray starts a process for each CPU ahead of time: one is enough."""
    cards = {CARD: node_type["resources"]["GPU"]} if node_type["resources"]["GPU"] else {}
    resources = {"CPU": 1, "object_store_memory": STORE_BYTES, **cards}
    return {**node_type, "resources": resources, "node_config": {}, "min_workers": 0}


@dataclass(frozen=True)
class AutoscaledCluster:
    address: str
    process: subprocess.Popen[str]

    def nodes(self) -> Counter[str]:
        """Nodes that live, by the label of their type; the head has none."""
        listed = list_nodes(self.address)  # Ray raises for a filter that leaves dead ones out
        return Counter(node.labels.get("stage", HEAD) for node in listed if node.state == "ALIVE")

    def processes(self) -> list[psutil.Process]:
        """The autoscaler's nodes are processes that it started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def autoscaler(self) -> str:
        """The command line of what adds nodes, and takes them away."""
        (monitor,) = [line for each in self.processes() if "/monitor.py" in (line := command_line(each))]
        return monitor


@contextmanager
def autoscaled(folder: Path) -> Iterator[AutoscaledCluster]:
    """A head alone, as `ray up` starts one. `folder`: for its configuration."""
    address = _free_address()
    path = folder / "ray_bootstrap_config.yaml"
    path.write_text(yaml.safe_dump(bootstrap_config(address)))
    options = ["--num-cpus=1", f"--object-store-memory={STORE_BYTES}", f"--port={address.rpartition(':')[2]}"]
    start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--autoscaling-config={path}"]
    own = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    # Told or not, this process has Ray's token, or has none; `ray start` would take one that it finds.
    environment = {"RAY_AUTH_MODE": "disabled"} | own | TRACING | TOYS | ENVIRONMENT
    with tempfile.TemporaryFile("a+") as output:
        process = subprocess.Popen(
            [*start, *options], env=environment, text=True, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            wait_until(lambda: output.seek(0) == 0 and RUNS in output.read(), process, output)
            yield AutoscaledCluster(address, process)
        finally:
            _end(process)


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _end(process: subprocess.Popen[str]) -> None:
    """The head, and what a test that failed left of its nodes."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    finally:
        for each in started:
            kill(each)
        process.kill()
        process.wait()
        forget_killed_cluster()
