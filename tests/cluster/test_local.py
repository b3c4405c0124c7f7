"""A cluster of this process, where the process has Ray already."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_a_process_that_has_ray_keeps_it() -> None:
    code = """
        import ray
        from omni_cluster.cluster.local import ClusterFailed, LocalCluster

        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            with LocalCluster(port=0):
                print("it started")
        except ClusterFailed as failed:
            print(failed, ray.is_initialized())
        ray.shutdown()
    """
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    assert made.stdout.splitlines()[-1] == (
        "Ray runs in this process already; call ray.shutdown() first, or start another process. True"
    )
