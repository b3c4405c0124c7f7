"""Stages of the toy family follow the load of a running application."""

from __future__ import annotations

import pytest

from tests.served.autoscaling_promises import AutoscalingPromises

pytestmark = pytest.mark.cluster


class TestAutoscaling(AutoscalingPromises):
    """Replicas are there in seconds, so that requests wait for the codes of others, if at all."""
