"""Reads pairs of a type of Kubernetes and an object, as JSON, and prints what each type has against its object.

It runs in an environment that has Kubernetes' client, whose types are made from the API's specification.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def faults(name: str, given: dict[str, Any]) -> list[str]:
    from kubernetes.client import models  # type: ignore[import-not-found, unused-ignore]
    from pydantic import ValidationError

    try:
        getattr(models, name).model_validate(given)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return []


if __name__ == "__main__":
    print(json.dumps([faults(name, given) for name, given in json.load(sys.stdin)]))
