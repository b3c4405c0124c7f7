"""How the two ends of a sound stage's queues wait for each other."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Final

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from omni_cluster.vllm_engine.install import replaced

LONGEST_LOOK_MS: Final = 2
"""A reader that has just begun to listen may miss the notice of a message, which is there all the same."""
LOOKING_S: Final = 1.0
"""For how long after it began, and after each message, a reader looks for one without a notice."""


class SleepingCondition(SpinCondition):
    """Has a reader sleep until a message is there.

    vLLM's turns round for a second after each message, as a reader that is in a hurry may: that fills a core at both
    ends of a stage that is always at work, and its steps are ahead of the device anyway. Its writer drops the notice of
    a message that comes within a millisecond of another, as a reader that turns round needs none; this one sends all.
    """

    def __init__(self, is_reader: bool, context: Any, notify_address: str) -> None:
        super().__init__(is_reader, context, notify_address, busy_loop_s=0)

    def notify(self) -> None:
        """Tells readers of a message."""
        self.local_notify_socket.getsockopt(zmq.EVENTS)  # has it see that the notice before has left
        super().notify()

    def wait(self, timeout_ms: int | None = None) -> None:
        """Returns when there may be a message, and after `timeout_ms` at the latest."""
        looks = time.monotonic() < self.last_read + LOOKING_S
        super().wait(LONGEST_LOOK_MS if looks else timeout_ms)


def readers_sleep() -> AbstractContextManager[None]:
    """Queues that are made inside wait so."""
    return replaced(shm_broadcast, "SpinCondition", SleepingCondition)


def sleep_between_calls() -> None:
    """As `readers_sleep`, from now on: in a process that is the worker of a sound stage."""
    shm_broadcast.SpinCondition = SleepingCondition  # type: ignore[misc]
