"""Where a stage's worker runs."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InProcessExecutor(UniProcExecutor):
    """The worker inside the engine's own process.

    Chosen by name rather than as "uni", which vLLM's CPU platform turns into a process of its own per worker.
    """
