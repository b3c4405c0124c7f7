"""A batch as a Ray Dataset, and its end in files that a killed batch goes on from."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig
from ray.exceptions import RayError

from omni_cluster.batch.answer import sample_of
from omni_cluster.batch.errors import ApplicationLost, BatchError
from omni_cluster.batch.limits import BatchLimits
from omni_cluster.batch.sources import Source
from omni_cluster.batch.worker import Answering
from omni_cluster.types.errors import ConfigError, OmniError

RESUMING_CPUS = 2
"""Ray Data leaves out finished rows in an actor that takes a CPU, beside the task that reads."""
_PURPOSES: Mapping[str, type[OmniError]] = {each.__name__: each for each in (ApplicationLost, BatchError, ConfigError)}
_ERROR = re.compile(r"^omni_cluster[\w.]*\.(\w+): (.+)$", re.MULTILINE)
_NOT_FROM_FILES = ".*plan doesn't support checkpointing"


def answer_rows(rows: Dataset, source: Source, limits: BatchLimits | None = None) -> Dataset:
    """Answers of conversations, one row each, as `batch.answer.Answer` has them. Lazy, as all of Ray Data.

    `rows`: with a string `id`, `messages` as OpenAI has them or as JSON text, and what else a request may say; see
    docs/use/batch.md. A bad row becomes a row with its error.
    """
    limits = limits or BatchLimits()
    blocks = rows.repartition(target_num_rows_per_block=limits.rows_a_block)
    return blocks.map_batches(
        Answering,
        fn_constructor_args=(source, limits),
        batch_size=limits.rows_a_block,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(
            size=source.processes,
            max_concurrent_calls_per_actor=limits.blocks_at_once,
            enable_true_multi_threading=True,
        ),
        **source.ray_options(),
    )


def write_parquet(answers: Dataset, folder: str, *, resume: bool = True) -> None:
    """Writes answers as Parquet. With `resume`, ids that an earlier, killed batch wrote there are not asked again.

    Which ids are finished is kept in `FOLDER.finished`: delete both to begin anew. Raises ApplicationLost, BatchError,
    and ConfigError of own engines; what was written stays finished.
    """
    place = place_of(folder)
    with _resuming(answers, place if resume else None), _own_errors():
        answers.write_parquet(place)


def write_webdataset(answers: Dataset, folder: str, *, resume: bool = True) -> None:
    """Writes answers as tar files, a sample each: `txt`, `wav`, and `json` for all else. See `write_parquet`."""
    samples, place = answers.map(sample_of), place_of(folder)
    with _resuming(samples, place if resume else None), _own_errors():
        samples.write_webdataset(place, encoder=None)


@contextmanager
def _resuming(answers: Dataset, folder: str | None) -> Iterator[None]:
    """Ray Data's checkpoints are on inside: ids are marked as finished with the file that has them."""
    if folder is None:
        yield
        return
    _check_cpus()
    context = answers.context
    context.checkpoint_config = CheckpointConfig("id", finished_of(folder), delete_checkpoint_on_success=False)
    try:
        with warnings.catch_warnings():
            # Ray Data would warn, and ask every row again.
            warnings.filterwarnings("error", _NOT_FROM_FILES)
            yield
    except UserWarning:
        sentence = "rows that are read from no files cannot be resumed; read them from files, or say resume=False."
        raise BatchError(sentence) from None
    finally:
        context.checkpoint_config = None


def place_of(folder: str) -> str:
    """A local folder from the root on: the processes that write have working directories of their own."""
    return folder if "://" in folder else os.path.abspath(folder)


def finished_of(folder: str) -> str:
    """Beside the folder."""
    return place_of(folder.rstrip("/") + ".finished")


def _check_cpus() -> None:
    """Raises BatchError where Ray Data would wait for a CPU for ever."""
    free = ray.available_resources().get("CPU", 0)
    if free < RESUMING_CPUS:
        raise BatchError(
            f"{free:g} CPUs are free in Ray's books, and a batch that can be resumed takes {RESUMING_CPUS}; "
            f"add a host, or say resume=False."
        )


@contextmanager
def _own_errors() -> Iterator[None]:
    """What a process raised on purpose, in place of Ray's account of it."""
    try:
        yield
    except RayError as error:
        raise purpose_of(str(error)) or error from None


def purpose_of(account: str) -> OmniError | None:
    """Ray Data keeps of a process's error no more than the text of its traceback: the last of ours in it is meant."""
    said = [(name, sentence) for name, sentence in _ERROR.findall(account) if name in _PURPOSES]
    return _PURPOSES[said[-1][0]](said[-1][1]) if said else None
