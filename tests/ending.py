"""How the tests' own process ends.

Ray leaves threads in a process that was connected to it: `ray.shutdown` does not end those of its gRPC channels. Python
takes down what they work on while they run, and a whole run of the suite ended with a segmentation fault after its
report was printed. So a process that has Ray in it ends at once when all is told, with the status that pytest gives.
"""

from __future__ import annotations

import os
import sys

import pytest

SESSION = pytest.StashKey[pytest.Session]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[SESSION] = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None and "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)
