"""The ingress as a replica of Serve's."""

from __future__ import annotations

import logging

import pytest

from omni_cluster.cluster.ingress import log_as_serve
from omni_cluster.server.log import logger


def test_what_the_http_face_logs_is_in_serve_s_log_from_its_level_on(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_logger, said = logging.getLogger("ray.serve"), list[str]()
    monkeypatch.setattr(serve_logger, "handle", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(logger, "filters", [])
    levels = logger.level, serve_logger.level
    try:
        log_as_serve()
        serve_logger.setLevel(logging.INFO)
        logger.debug("a detail")
        logger.info("a request of %d tokens", 3)
    finally:
        logger.setLevel(levels[0])
        serve_logger.setLevel(levels[1])
    assert said == ["a request of 3 tokens"]
