"""An operator drains a node by docs/operate/operations.md alone, and no request notices."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, section
from tests.served.app import PATIENCE_S, ServedApp, until
from tests.served.drain_promises import END_S, speaking
from tests.served.recovering import Recovering, is_ready
from tests.served.replaced import REPLACED_S

pytestmark = [pytest.mark.cluster, pytest.mark.full]

PAGE = "docs/operate/operations.md"
TITLE = "Drain a node"
STAGE = "codes"


def drain_command() -> str:
    (block,) = [each for each in section(PAGE, TITLE) if each.language == "bash"]
    return block.text


def list_command() -> str:
    """Of the step that waits."""
    steps = (ROOT / PAGE).read_text().split(f"\n## {TITLE}\n")[1].split("\n## ")[0]
    (command,) = re.findall(r"`(ray list actors [^`]+)`", steps)
    return str(command)


async def printed_by(app: ServedApp, command: str, node_id: str) -> str:
    """By an operator's shell, which finds this environment's commands, and knows where the cluster is."""
    assert app.nodes is not None and "NODE_ID" in command
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"RAY_ADDRESS": app.nodes.cluster.address, "PATH": path}
    shell = ["bash", "-c", command.replace("NODE_ID", node_id)]
    ran = await asyncio.to_thread(
        subprocess.run, shell, capture_output=True, text=True, env=environment, timeout=PATIENCE_S
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.timeout(900)
async def test_a_node_is_drained_by_the_page(toy_nodes: ServedApp, recovering: Recovering) -> None:
    nodes = toy_nodes.nodes
    assert nodes is not None
    expected, before = await recovering.undisturbed(recovering.body()), await recovering.recoveries()
    (status,) = await toy_nodes.statuses_of(STAGE)
    node_id, leaves = status["node_id"], nodes.by_role.pop(STAGE)
    assert "ServeReplica" in await printed_by(toy_nodes, list_command(), node_id)
    nodes.add(STAGE)  # another one that may have the stage's replica

    async def is_empty() -> bool:
        return "ServeReplica" not in await printed_by(toy_nodes, list_command(), node_id)

    async with speaking(recovering.body()) as (stream,):
        await printed_by(toy_nodes, drain_command(), node_id)
        recovering.assert_same(await asyncio.wait_for(stream, END_S), expected)
        await until(is_empty, "the node has no replica any more", REPLACED_S)
    nodes.cluster.remove_node(leaves)
    assert await is_ready(toy_nodes)
    recovering.assert_same(await recovering.answer_with(recovering.body()), expected)
    assert await recovering.recoveries() == before
