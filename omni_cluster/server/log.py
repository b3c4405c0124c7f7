"""The log of the HTTP face; the server that runs it says where it is written."""

from __future__ import annotations

import logging

logger = logging.getLogger("omni_cluster.server")
