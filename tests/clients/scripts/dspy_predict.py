"""dspy's language model."""

from __future__ import annotations

import os

# Else litellm inside of it waits for prices from the internet.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from told import KEY, MAX_TOKENS, MODEL, QUESTION, URL, doing

model = dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, max_tokens=MAX_TOKENS, temperature=0, cache=False)
with doing("chat") as seen:
    (answer,) = model(QUESTION)
    seen["text"] = answer if isinstance(answer, str) else answer["text"]

with doing("json object") as seen:
    # What its adapters ask for; of a prediction the tiny checkpoint makes no sense.
    (answer,) = model(QUESTION, response_format={"type": "json_object"})
    seen["text"] = answer if isinstance(answer, str) else answer["text"]
