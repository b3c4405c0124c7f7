import shutil
from pathlib import Path

import pytest

from training.checkpoint import write_toy
from training.speech import PROGRAM


@pytest.fixture(scope="session")
def espeak() -> None:
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed; install the Debian package espeak-ng.")


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """The toy without weights."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    return folder


@pytest.fixture
def toy_copy(toy_folder, tmp_path) -> Path:
    """The same, for a test alone."""
    return Path(shutil.copytree(toy_folder, tmp_path / "toy"))
