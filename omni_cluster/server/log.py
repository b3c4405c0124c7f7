"""The log of the HTTP face; whoever serves it says where it is written."""

from __future__ import annotations

import logging

logger = logging.getLogger("omni_cluster.server")
