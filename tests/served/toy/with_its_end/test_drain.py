"""The toy's drains; beside it the toy that paints, whose pictures cross a cluster."""

from __future__ import annotations

import io
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image

from tests.families.painted import png_of
from tests.served.drain_promises import DrainPromises
from tests.served.toy_config import TOY, toy_config

pytestmark = pytest.mark.cluster

GRACE_S = 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy with a short time to end, and stages that take longer for a long answer: three times its grace."""
    config = toy_config()
    config["limits"] = {"closing_grace_s": GRACE_S}
    config["stages"][2]["options"]["token_s"] *= 4
    painter = yaml.safe_load(TOY.with_name("painter.yaml").read_text())
    path = tmp_path_factory.mktemp("serve") / "toys.yaml"
    applications = [
        {"name": name, "route_prefix": prefix, "import_path": "deployments:app", "args": {"config": config}}
        for name, prefix, config in (("default", "/", config), ("painter", "/beside", painter))
    ]
    path.write_text(yaml.safe_dump({"applications": applications}))
    return path


class TestDrain(DrainPromises):
    """Its sound is the same to the sample, whichever replicas make it."""

    def ask_beside(self, client: httpx.Client) -> None:
        with Image.open(io.BytesIO(png_of(client, "/beside"))) as opened:
            assert opened.format == "PNG" and len(opened.getcolors() or ()) > 1
