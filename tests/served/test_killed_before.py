"""How the tests' own application is started, where an earlier run was killed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray._private.utils import read_ray_address, write_ray_address
from tests.cluster.conftest import SingleFlightCache

from tests.served.app import ServedApp, forget_killed_cluster


def test_a_killed_clusters_address_is_forgotten_and_a_living_ones_is_not(tmp_path: Path) -> None:
    forget_killed_cluster(str(tmp_path))  # there is none
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        write_ray_address(address, str(tmp_path))
        forget_killed_cluster(str(tmp_path))
        assert read_ray_address(str(tmp_path)) == address
    forget_killed_cluster(str(tmp_path))
    assert read_ray_address(str(tmp_path)) is None


def test_an_application_that_did_not_come_up_is_started_once() -> None:
    starts = []

    @contextmanager
    def start() -> Iterator[ServedApp]:
        starts.append(len(starts))
        raise AssertionError("it did not come up")
        yield  # type: ignore[unreachable]

    shared = SingleFlightCache(start)
    for _ in range(2):
        with pytest.raises(AssertionError, match="it did not come up"):
            shared.app()
    assert starts == [0]
