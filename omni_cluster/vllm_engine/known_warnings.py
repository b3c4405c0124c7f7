"""What libraries warn of at each start of an engine, and what means nothing to an operator: these are not printed.

Each is known by its logger and its words. All else that a library says is printed as it is, errors always.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from omni_cluster.models.dropped_warnings import OF_CHECKPOINTS, drop_warnings

VLLM: Mapping[str, Sequence[str]] = {
    # Triton is for cards, and comes with torch.
    "triton_utils.importing": ("Disabling Triton",),
    "platforms.cpu": (
        "Triton is not installed",  # the same once more
        "Reset SSM cache type",  # of a kind of model that has a state in place of a cache: none is served
    ),
    # What `enforce_eager` of the configuration is there for.
    "config.vllm": ("Enforce eager set", "Inductor compilation was disabled by user settings"),
    # The scheduler is ours, and checked against the version of vLLM.
    "config.scheduler": ("Using custom scheduler class",),
    # vLLM asks by default for what a model may lack.
    "config.model": ("Model does not support mm_device_do_normalize",),
    # Adapters change the language model; `models/lora.py` refuses those that would change more.
    "lora.model_manager": ("no matching PunicaWrapper",),
    # Of each process, whatever tokenizer an adapter has: the checkpoint's is used.
    "v1.engine.input_processor": ("different tokenizers for different LoRAs",),
    # A stage without text has no tokenizer.
    "renderers.base": ("Using None for EOS token id", "Using None for BOS token id"),
    # vLLM's worker sets the variable, and its engine does not know it.
    "platforms.interface": ("variable detected: VLLM_DIST_IDENT",),
    "v1.worker.cpu_worker": (
        "is not found in LD_PRELOAD",  # a CPU is for trying: nothing is to be installed for its speed
        "CPU backend doesn't allow to use `torch.set_num_threads`",  # vLLM's own call, which it ignores on purpose
    ),
}
"""By the name of vLLM's module."""

LOGGED: Mapping[str, Sequence[str]] = {
    **OF_CHECKPOINTS,
    # A machine may have CUDA's folder and no card.
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    **{".".join(("vllm", name)): words for name, words in VLLM.items()},
}

WARNED: Mapping[str, type[Warning]] = {
    # vLLM looks through all names of torch for kernels.
    r"`torch\.distributed\.reduce_op` is deprecated": FutureWarning,
}


def drop_known_warnings() -> None:
    """For this process and its forks, before it imports vLLM; may be called again."""
    drop_warnings(LOGGED)
    for words, category in WARNED.items():
        warnings.filterwarnings("ignore", message=words, category=category)
