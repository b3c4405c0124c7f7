"""`python -m omni_cluster` is the command `omni-cluster`."""

from __future__ import annotations

import sys

from omni_cluster.cli import main

# A spawned child imports this module again under another name.
if __name__ == "__main__":
    sys.exit(main())
