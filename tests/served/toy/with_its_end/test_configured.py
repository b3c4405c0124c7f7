"""An operator sets a voice, a key, a quota and replicas by docs/operate/operations.md alone, and rolls them out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.pages import section
from tests.served.app import BASE_URL, KEY, ServedApp, until
from tests.served.deployed import run_serve
from tests.served.replaced import REPLACED_S
from tests.served.toy_config import toy_config

pytestmark = [pytest.mark.cluster, pytest.mark.full]

PAGE = "docs/operate/operations.md"
KEYS = "/etc/omni_cluster/keys-2"
CONFIG = "/etc/omni_cluster/my-2.yaml"
MINUTE = 60
"""Requests that the page gives a key."""


def block(title: str, language: str) -> str:
    (found,) = [each.text for each in section(PAGE, title) if each.language == language]
    return found


def roll_out(app: ServedApp, path: Path) -> None:
    """As the page has it: the application's file names the new path."""
    file = path.with_name(f"serve-{path.name}")
    file.write_text(block("Roll out a configuration", "yaml").replace(CONFIG, str(path)))
    run_serve("deploy", "-a", app.dashboard_url, str(file))


@pytest.fixture
def folder(toy: ServedApp, tmp_path: Path) -> Iterator[Path]:
    """With the configuration that runs as `my-1.yaml`: it is back afterwards."""
    (tmp_path / "my-1.yaml").write_text(yaml.safe_dump(toy_config()))
    yield tmp_path
    toy.client.headers["Authorization"] = f"Bearer {KEY}"


def ask(path: str, key: str | None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=BASE_URL, headers=headers, timeout=MINUTE) as client:
        return client.post(path, json=body) if body else client.get(path)


def new_key(folder: Path) -> str:
    """Made by the page's command, beside one that stays."""
    (folder / "keys-1").write_text(f"{KEY}\n")
    subprocess.run(["bash", "-c", block("Add an API key", "bash")], cwd=folder, check=True)
    kept, made = (folder / "keys-2").read_text().split()
    assert kept == KEY and len(made) > len(KEY)
    return made


@pytest.mark.timeout(900)
async def test_a_configuration_with_all_of_it_rolls_out_and_back(toy: ServedApp, folder: Path) -> None:
    key = new_key(folder)
    first, *others = ask("/v1/audio/voices", None).json()["names"]
    quota = yaml.safe_load(block("Limit what one client may use", "yaml").replace(KEYS, str(folder / "keys-2")))
    assert quota["api"]["requests_per_minute"] == MINUTE
    config = toy_config() | quota | {"default_voice": others[0]}
    config["stages"][1]["num_replicas"] = 2
    (folder / "my-2.yaml").write_text(yaml.safe_dump(config))
    roll_out(toy, folder / "my-2.yaml")

    async def has_two() -> bool:
        answer = ask("/ready", KEY)
        return answer.status_code == 200 and answer.json()["replicas"].get("codes") == 2

    await until(has_two, "the stage has two replicas", REPLACED_S)
    assert [ask("/v1/models", each).status_code for each in (None, key, KEY)] == [401, 200, 200]
    assert ask("/v1/audio/voices", key).json()["names"][0] == others[0]
    await the_quota_ends(key)
    assert ask("/v1/chat/completions", KEY, model="none").status_code == 400  # another key has its own

    roll_out(toy, folder / "my-1.yaml")

    async def is_back() -> bool:
        answer = ask("/ready", None)
        return answer.status_code == 200 and answer.json()["replicas"].get("codes") == 1

    await until(is_back, "the former configuration is there", REPLACED_S)
    assert ask("/v1/audio/voices", None).json()["names"][0] == first


async def the_quota_ends(key: str) -> None:
    """Those that are refused for what they say count too, so they cost nothing here."""

    async def is_refused() -> bool:
        answer = ask("/v1/chat/completions", key, model="none")
        if answer.status_code == 400:
            return False
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded", answer.text
        return int(answer.headers["retry-after"]) >= 1

    await until(is_refused, "the key has used its quota")
