"""What is not printed of what libraries say, and that nothing else is lost."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch

from omni_cluster.vllm_engine.known_warnings import LOGGED, drop_known_warnings

IDS = "Model config: x_token_id must be `None` or an integer within the vocabulary (between 0 and 7), got 9."


@pytest.fixture(autouse=True)
def dropped() -> None:
    drop_known_warnings()
    drop_known_warnings()


@pytest.mark.parametrize("name", LOGGED)
def test_a_known_warning_is_not_logged_and_others_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)  # vLLM's loggers pass nothing on
    try:
        for words in LOGGED[name]:
            logger.warning("before: %s and after", words)
        logger.warning("the disk is full")
    finally:
        logger.removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records if record.name == name}
    assert said == {"the disk is full"}


def test_an_error_of_the_same_words_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers.configuration_utils").error(IDS)
    assert len(caplog.records) <= 1 and not _is_dropped(logging.ERROR)
    assert _is_dropped(logging.WARNING)


def _is_dropped(level: int) -> bool:
    record = logging.LogRecord("transformers.configuration_utils", level, __file__, 1, IDS, None, None)
    return not logging.getLogger("transformers.configuration_utils").filter(record)


def test_torch_s_old_name_is_looked_at_without_a_warning() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        drop_known_warnings()
        hasattr(torch.distributed.reduce_op, "__dict__")
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in heard] == ["another"]


@pytest.mark.full
def test_what_engines_are_forked_from_is_imported_without_a_word() -> None:
    """In a process of its own, with the libraries as they are installed: a new version may say something new."""
    command = [sys.executable, "-c", "import omni_cluster.vllm_engine.preloaded"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
