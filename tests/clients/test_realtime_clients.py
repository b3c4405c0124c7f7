"""The field's realtime clients, unmodified: they speak in real time, interrupt, and lose their connection.

Each is told the server's address, a key and how long answers may be; all else is its own default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.engine.omni_llm import OmniLLM
from tests.clients.field import REALTIME_CLIENTS
from tests.clients.runs import SCRIPT_S, Client, Runs
from tests.engine.stages import short_default, until
from tests.packages import FETCH_S
from tests.server.local import LocalApp, local_app

BYTES_A_CODE = 480 * 2
MAX_PROMPT_TOKENS = 512

EACH = [
    pytest.param(client, did, id=f"{client.name}:{did}", marks=[getattr(pytest.mark, mark) for mark in client.marks])
    for client in REALTIME_CLIENTS
    for did in client.does
]

Seen = Mapping[str, Any]


@pytest.fixture(scope="module")
def local(omni: OmniLLM) -> Iterator[LocalApp]:
    """With answers as long as the engines have place for, so that there is time to interrupt them."""
    limits = short_default().limits
    fields = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_output_tokens": limits.max_prompt_tokens}
    with local_app(omni, limits.model_copy(update=fields)) as app:
        yield app


@pytest.fixture(scope="module")
def runs(local: LocalApp, folder: Path, tiny: Path) -> Runs:
    return Runs(local.url, folder, tiny)


@pytest.mark.timeout(FETCH_S + SCRIPT_S)
@pytest.mark.parametrize(("client", "did"), EACH)
async def test_a_client_talks(local: LocalApp, runs: Runs, client: Client, did: str) -> None:
    saw = runs.saw(client, did)
    assert saw.ok, saw.seen["error"]
    assert saw.seen.get("errors", []) == []
    CHECKS[did](saw.seen, runs.folder_of(client))
    await until(local.nothing_is_left)


def _is_spoken(seen: Seen, folder: Path) -> None:
    """Text, and sound in whole codes."""
    assert seen["text"]
    num_bytes = (folder / seen["file"]).stat().st_size
    assert num_bytes > 0 and num_bytes % BYTES_A_CODE == 0


def _knows_the_first_turn(seen: Seen, folder: Path) -> None:
    """Its prompt has what was said before, and the answer to it; and the client's own history has both."""
    first, second = seen["first"], seen["second"]
    assert second["text in"] - first["text in"] >= first["text out"] > 0
    assert second["sound in"] > first["sound in"] > 0
    assert seen["text"] and seen["kept"]


def _is_interrupted(seen: Seen, folder: Path) -> None:
    """The client saw it, nothing came after it, and what interrupted was answered."""
    assert (seen["status"], seen["reason"]) == ("cancelled", "turn_detected")
    assert seen["late"] == []
    assert seen["text"]


def _is_a_call(seen: Seen, folder: Path) -> None:
    """With whole arguments of its schema; and there is an answer to its result."""
    assert seen["name"] == "set_lamp"
    assert seen["arguments"].keys() == {"color", "on"}
    assert seen["arguments"]["color"] in ("red", "green") and isinstance(seen["arguments"]["on"], bool)
    assert seen["text"]


def _ends_with_its_connection(seen: Seen, folder: Path) -> None:
    """The answer that was on its way ended unsaid in the engine too, and the client may come again."""
    assert seen["cancelled"] >= 1
    assert seen["text"]


CHECKS: Mapping[str, Callable[[Seen, Path], None]] = {
    "spoken turn": _is_spoken,
    "second turn": _knows_the_first_turn,
    "interruption": _is_interrupted,
    "tool": _is_a_call,
    "dropped connection": _ends_with_its_connection,
}
