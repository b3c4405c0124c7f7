"""A full store beside the engines of the default family."""

from __future__ import annotations

import pytest

from tests.served.full_store_promises import FullStorePromises

pytestmark = pytest.mark.full


class TestFullStore(FullStorePromises):
    """Rows of a prompt are those of the tiny thinker."""
