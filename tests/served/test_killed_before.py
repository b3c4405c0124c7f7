"""How the tests' own application is started, where an earlier run was killed."""

from __future__ import annotations

import socket
from pathlib import Path

from ray._private.utils import read_ray_address, write_ray_address

from tests.served.app import forget_killed_cluster


def test_a_killed_clusters_address_is_forgotten_and_a_living_ones_is_not(tmp_path: Path) -> None:
    forget_killed_cluster(str(tmp_path))  # there is none
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        write_ray_address(address, str(tmp_path))
        forget_killed_cluster(str(tmp_path))
        assert read_ray_address(str(tmp_path)) == address
    forget_killed_cluster(str(tmp_path))
    assert read_ray_address(str(tmp_path)) is None
