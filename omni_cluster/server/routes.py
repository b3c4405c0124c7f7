"""How paths are added to the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI


def add_get(api: FastAPI, path: str, answer: Callable[..., Any], **options: Any) -> None:
    """GET, and HEAD, which is answered as GET; the HTTP server sends no body then. The schema has GET alone."""
    api.add_api_route(path, answer, methods=["GET"], **options)
    api.add_api_route(path, answer, methods=["HEAD"], **(options | {"include_in_schema": False}))
