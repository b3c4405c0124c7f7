import shutil
from pathlib import Path

import pytest
import torch

from training.checkpoint import write_toy
from training.codes import CEPSTRA, Codebook
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


@pytest.fixture
def codebook(espeak, tmp_path) -> Path:
    """Of random sounds; texts have other codes of another one."""
    centres = 3 * torch.randn(20, CEPSTRA, generator=torch.Generator().manual_seed(0))
    centres[0] = torch.inf
    Codebook(centres).save(tmp_path / "codebook.pt")
    return tmp_path / "codebook.pt"
