from pathlib import Path

import pytest

from training.checkpoint import write_toy


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """The toy without weights."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    return folder
