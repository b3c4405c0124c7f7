"""A replica of any stage dies at any moment of a stream, of the toy family."""

from __future__ import annotations

import pytest

from tests.served.recovery_promises import RecoveryPromises

pytestmark = pytest.mark.cluster


class TestRecovery(RecoveryPromises):
    """With the sound that it would have had, to the sample."""
