"""A Prometheus of the tests' own, Debian's package, and the board's queries as Grafana sends them to it."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml

from deploy.grafana.make_board import PANELS, sent
from tests.served.app import until

SCRAPE_S = 3
BINARY = shutil.which("prometheus")

needs_prometheus = pytest.mark.skipif(
    BINARY is None, reason="there is no `prometheus` on the PATH; Debian's package of that name has it"
)


def expressions() -> dict[str, list[str]]:
    """The queries of each panel as Grafana would send them."""
    return {panel.title: [sent(query.expression) for query in panel.queries] for panel in PANELS}


@dataclass
class Prometheus:
    """A running server. A query's result: the value of each series by the values of the labels asked for."""

    client: httpx.AsyncClient

    async def query(self, expression: str, *labels: str) -> dict[tuple[str, ...], float]:
        series = await self._series(expression)
        return {tuple(each["metric"].get(label, "") for label in labels): float(each["value"][1]) for each in series}

    async def has_data(self, expression: str) -> bool:
        return any(math.isfinite(float(each["value"][1])) for each in await self._series(expression))

    async def _series(self, expression: str) -> list[dict[str, Any]]:
        answer = (await self.client.get("/api/v1/query", params={"query": expression})).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def prometheus(targets: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """Scrapes the targets, by job, until the context ends."""
    jobs = [{"job_name": job, "static_configs": [{"targets": list(of_job)}]} for job, of_job in targets.items()]
    with TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = Path(folder) / "prometheus.yml"
        config.write_text(yaml.safe_dump({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}))
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen([str(BINARY), *options], stdout=log, stderr=subprocess.STDOUT)
            try:
                async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
                    await until(lambda: is_ready(client), "Prometheus is ready")
                    yield Prometheus(client)
            finally:
                process.terminate()
                process.wait(30)


async def is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/-/ready")).status_code == 200
    return False
