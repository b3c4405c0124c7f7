"""What KubeRay accepts."""

from __future__ import annotations

import functools
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator


@functools.cache
def validator() -> Draft202012Validator:
    schema = yaml.safe_load(Path(__file__).with_name("kuberay_rayservice_v1.yaml").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
