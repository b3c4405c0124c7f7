"""A running application gets another configuration, as `serve deploy` brings it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.served.app import PATIENCE_S, ROOT, ServedApp


def deploy(app: ServedApp, config: Mapping[str, Any], path: Path) -> None:
    """`path`: of the file that is made of the configuration."""
    application = {"name": "default", "import_path": "deployments:app", "args": {"config": config}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    run_serve("deploy", "-a", app.dashboard_url, str(path))


def run_serve(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).parent / "serve"), *arguments], cwd=ROOT, check=True, timeout=PATIENCE_S)
