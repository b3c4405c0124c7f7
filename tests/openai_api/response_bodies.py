"""Bodies of responses that several modules send."""

from __future__ import annotations

import json
from typing import Any

from omni_cluster.openai_api.responses import (
    CheckedResponses,
    ResponsesRequest,
    check_responses_request,
    open_responses_request,
)
from tests.openai_api.parts import LIMITS

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}


def checked(**fields: Any) -> CheckedResponses:
    body = json.dumps({"model": "omni", "input": "hello", **fields}).encode()
    return check_responses_request(body, models=["omni"], limits=LIMITS)


def parse(**fields: Any) -> ResponsesRequest:
    return open_responses_request(checked(**fields), {}, LIMITS)
