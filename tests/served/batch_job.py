"""A batch as a program of its own, with a Ray of its own: `python -m tests.served.batch_job URL ROWS OUT TIMES`."""

from __future__ import annotations

import sys

import ray
import ray.data

from omni_cluster.batch import Application, BatchLimits, answer_rows, write_parquet

LIMITS = BatchLimits(rows_at_once=4, rows_a_block=2)
CPUS = 4


def main(url: str, rows: str, out: str, times: str) -> None:
    ray.init("local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    ray.data.DataContext.get_current().enable_progress_bars = False
    for _ in range(int(times)):
        write_parquet(answer_rows(ray.data.read_json(rows), Application(url=url), LIMITS), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
