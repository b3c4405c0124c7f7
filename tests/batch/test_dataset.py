"""What needs no Ray of a batch's end."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.batch.dataset import finished_of, place_of, purpose_of
from omni_cluster.batch.errors import ApplicationLost, BatchError
from omni_cluster.types.errors import ConfigError, OmniError

ACCOUNT = """ray::MapWorker(MapBatches(Answering)).submit() (pid=1038, ip=192.0.2.2)
  File "omni_cluster/batch/client.py", line 142, in _heard
    raise NotNow(str(error) or type(error).__name__) from None
omni_cluster.batch.client.NotNow: All connection attempts failed

During handling of the above exception, another exception occurred:

{}

The above exception was the direct cause of the following exception:

ray.exceptions.UserCodeException: UDF failed to process a data block.
Failed to apply UDF transform after 1/1 attempts (total backoff 0.0s)."""


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("omni_cluster.batch.errors.ApplicationLost: the application is lost.", ApplicationLost),
        ("omni_cluster.batch.errors.BatchError: the key is wrong.", BatchError),
        ("omni_cluster.types.errors.ConfigError: model is 'x'.", ConfigError),
    ],
)
def test_an_error_on_purpose_is_found_in_the_account_of_ray(said: str, kind: type[OmniError]) -> None:
    found = purpose_of(ACCOUNT.format(said))
    assert type(found) is kind and str(found) == said.split(": ", 1)[1]


def test_an_error_that_was_no_purpose_of_ours_stays_ray_s() -> None:
    assert purpose_of(ACCOUNT.format("ValueError: omni_cluster.batch.errors.BatchError: quoted")) is None


def test_finished_ids_are_beside_the_folder_under_a_whole_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (place_of("out/"), place_of("s3://bucket/out")) == (str(tmp_path / "out"), "s3://bucket/out")
    assert finished_of("out/") == str(tmp_path / "out.finished")
    assert finished_of("s3://bucket/out") == "s3://bucket/out.finished"
