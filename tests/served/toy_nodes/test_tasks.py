"""An operator drains a node by docs/operate/operations.md alone."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest

from tests.commands import lines_of
from tests.pages import section
from tests.served.app import PATIENCE_S, ServedApp, until
from tests.served.drain_promises import END_S, speaking
from tests.served.recovering import Recovering, is_ready
from tests.served.replaced import REPLACED_S

pytestmark = [pytest.mark.cluster, pytest.mark.full]

STAGE = "codes"


def page_command(title: str, **words: str) -> str:
    """The only command of the section, with what the reader puts in."""
    (block,) = [block for block in section("docs/operate/operations.md", title) if block.language == "bash"]
    (command,) = lines_of(block.text)
    for name, word in words.items():
        assert name in command
        command = command.replace(name, word)
    return command


async def test_a_node_is_drained_by_the_page(toy_nodes: ServedApp, recovering: Recovering) -> None:
    nodes = toy_nodes.nodes
    assert nodes is not None
    expected = await recovering.undisturbed(recovering.body())
    (status,) = await toy_nodes.statuses_of(STAGE)
    node_id, leaves = status["node_id"], nodes.by_role.pop(STAGE)
    nodes.add(STAGE)  # another one that may have the stage's replica

    async def is_empty() -> bool:
        return node_id not in {each["node_id"] for each in await toy_nodes.living(STAGE)} and await is_ready(toy_nodes)

    async with speaking(recovering.body()) as (stream,):
        environment = os.environ | {"RAY_ADDRESS": nodes.cluster.address}
        command = page_command("Drain a node", NODE_ID=node_id)
        await asyncio.to_thread(subprocess.run, command, shell=True, check=True, env=environment, timeout=PATIENCE_S)
        recovering.assert_same(await asyncio.wait_for(stream, END_S), expected)
    await until(is_empty, "the node has no replica any more", REPLACED_S)
    nodes.cluster.remove_node(leaves, allow_graceful=True)
    recovering.assert_same(await recovering.answer_with(recovering.body()), expected)
