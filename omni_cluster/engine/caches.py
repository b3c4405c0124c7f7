"""One folder for all that the engines of a process compile, so that the next start, or a copy of it, finds it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from omni_cluster.config.caches import compiled_folder
from omni_cluster.types.errors import ConfigError

# Each is read when something is compiled or looked up. Unset, most would be folders of the home; Triton's would be one
# thing where torch compiles a model, and another where it reads what it compiled before: the same kernels again.
PARTS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}


def use_cache_dir(cache_dir: str | None) -> Path:
    """Returns the folder that this process, and all that it starts, keep in it what they compile from now on.

    To be called before torch and vLLM are imported. Variables that are set hold where the configuration names no
    folder. Raises ConfigError for a folder that cannot be written.
    """
    folder = check_cache_dir(cache_dir)
    for name, part in PARTS.items():
        if cache_dir is not None or not _is_chosen(os.environ.get(name)):
            os.environ[name] = str(folder / part)
    return folder


def _is_chosen(value: str | None) -> bool:
    """Whether somebody set a variable: torch, once imported, sets its own to a folder of the host's temporary one."""
    return bool(value) and not str(value).startswith(os.path.join(tempfile.gettempdir(), "torchinductor_"))


def check_cache_dir(cache_dir: str | None) -> Path:
    """Returns the folder. Raises ConfigError if it cannot be written."""
    folder = compiled_folder(cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        said = repr(cache_dir) if cache_dir else f"not set and so {folder}"
        raise ConfigError(
            f"cache_dir is {said}, where nothing can be written ({error.strerror}); name a folder that this user may "
            f"write, for example cache_dir: /tmp/omni_cluster."
        ) from None
    return folder
