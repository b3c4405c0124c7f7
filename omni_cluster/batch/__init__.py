"""Batches of conversations on Ray Data: a Dataset of rows in, a Dataset of their answers out."""

from omni_cluster.batch.dataset import answer_rows, write_parquet, write_webdataset
from omni_cluster.batch.errors import ApplicationLost, BatchError
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.sources import Application, Engines

__all__ = [
    "Application",
    "ApplicationLost",
    "BatchError",
    "BatchLimits",
    "Engines",
    "answer_rows",
    "write_parquet",
    "write_webdataset",
]
