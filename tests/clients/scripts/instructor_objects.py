"""instructor, with its modes for OpenAI."""

from __future__ import annotations

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from told import KEY, MAX_OBJECT_TOKENS, MODEL, QUESTION, URL, doing


class Lamp(BaseModel):
    color: Literal["red", "green"]
    on: bool


for did, mode in (
    ("structured", instructor.Mode.TOOLS),
    ("structured by a schema", instructor.Mode.JSON_SCHEMA),
):
    with doing(did) as seen:
        client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
        lamp = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            response_model=Lamp,
            max_tokens=MAX_OBJECT_TOKENS,
            temperature=0,
            max_retries=0,
        )
        seen["object"] = lamp.model_dump()
