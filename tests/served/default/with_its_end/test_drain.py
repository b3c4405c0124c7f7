"""The drains of the default application; beside it its thinker alone."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import yaml

from tests.configs import TINY_CONFIG
from tests.served.deployed import run_serve
from tests.served.drain_promises import DrainPromises
from tests.served.recovering import CHAT

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `serve build` makes of the default, with the tests' configuration, and a thinker alone."""
    path = tmp_path_factory.mktemp("serve") / "two.yaml"
    run_serve("build", "deployments:default", "-o", str(path))
    built = yaml.safe_load(path.read_text())
    del built["http_options"]  # those of the Serve that runs
    config = yaml.safe_load(TINY_CONFIG.read_text())
    (default,) = built["applications"]
    default |= {"name": "default", "import_path": "deployments:app", "args": {"config": config}}
    config = config | {"stages": config["stages"][:1]}
    beside = {"name": "text", "route_prefix": "/beside", "import_path": "deployments:app", "args": {"config": config}}
    path.write_text(yaml.safe_dump(built | {"applications": [default, beside]}))
    return path


class TestDrain(DrainPromises):
    """With engines, which have shared memory to leave behind."""

    num_long = 8

    def ask_beside(self, client: httpx.Client) -> None:
        asks = {"model": "preset:tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        texts = set()
        for prefix in ("", "/beside"):
            answer = client.post(prefix + CHAT, json=asks)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["message"]["content"])
        assert len(texts) == 1
        spoken = client.post(f"/beside{CHAT}", json=asks | {"modalities": ["text", "audio"]})
        assert spoken.status_code == 400, spoken.text
