"""A full store beside stages of the toy family."""

from __future__ import annotations

import pytest

from tests.served.full_store_promises import FullStorePromises

pytestmark = pytest.mark.cluster


class TestFullStore(FullStorePromises):
    """The toy says how large pictures are, and hands rows of a prompt on."""
