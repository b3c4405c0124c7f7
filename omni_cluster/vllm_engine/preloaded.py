"""What the process that engines are forked from imports, by importing this."""

import gc

# Looking for garbage takes a quarter of the time of imports; what they made is frozen, or each fork would write to it.
gc.disable()

from omni_cluster.vllm_engine.known_warnings import drop_known_warnings  # noqa: E402

drop_known_warnings()

from vllm.v1.executor import multiproc_executor  # noqa: E402, F401

from omni_cluster.vllm_engine import executor, scheduler  # noqa: E402, F401
from omni_cluster.vllm_engine.worker import ar_worker, sound_worker  # noqa: E402, F401

gc.freeze()
gc.enable()
