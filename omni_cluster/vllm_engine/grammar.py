"""What the text of a request must be, as vLLM keeps it: by a grammar that the engine compiles beside its steps."""

from __future__ import annotations

import json
from typing import Any

from vllm import SamplingParams
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from omni_cluster.types.errors import GrammarRefused, RequestError
from omni_cluster.types.sampling import APART, STRUCTURE

SETTINGS: dict[str, Any] = {"backend": "xgrammar", "disable_any_whitespace": True}
"""One backend for all requests: an engine keeps the one that its first request took. Without free whitespace, of which
a model may make no end."""
INVALID = "is invalid, or has what no text can be kept to; see docs/use/chat.md for what is supported."
NO_WAY = "allows no text at some place, or takes too long to be prepared; send another one."
_CHARACTER = r'[^"\\\x00-\x1f]'
"""Of a JSON string, as such."""


def with_grammar(chosen: dict[str, Any], stage: str) -> dict[str, Any]:
    """Sampling parameters as vLLM takes them. RequestError for some that cannot be kept beside a grammar."""
    structure = chosen.get(STRUCTURE)
    if structure is None:
        return chosen
    beside = next((name for name in APART if chosen.get(name)), None)
    if beside is not None:
        raise RequestError(f"{beside} and {STRUCTURE} of stage {stage} are both given; leave one of them out.")
    kept = {kind: _kept(kind, value) for kind, value in structure.items()}
    return {**chosen, STRUCTURE: StructuredOutputsParams(**kept)}


def _kept(kind: str, value: Any) -> Any:
    if kind not in ("json", "structural_tag"):
        return value
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value  # vLLM refuses what is no JSON
    return json.dumps(valid_strings(read))


def valid_strings(node: Any) -> Any:
    """A schema whose strings are valid JSON. xgrammar lets control characters into those whose length is bounded."""
    if isinstance(node, list):
        return [valid_strings(each) for each in node]
    if not isinstance(node, dict):
        return node
    least, most = node.get("minLength"), node.get("maxLength")
    if node.get("type") != "string" or (least is None and most is None) or "pattern" in node or "format" in node:
        return {name: valid_strings(each) for name, each in node.items()}
    rest = {name: each for name, each in node.items() if name not in ("minLength", "maxLength")}
    return {**rest, "pattern": f"^{_CHARACTER}{{{least or 0},{'' if most is None else most}}}$"}


class GrammarCheck:
    """Reads grammars before the engine is sent any. vLLM would do so in the loop that serves all requests."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._model_config = inputs.model_config
        self._config: StructuredOutputsConfig = inputs.structured_outputs_config
        self._tokenizer = inputs.tokenizer
        inputs.structured_outputs_config = None  # type: ignore[assignment]

    def check(self, params: SamplingParams) -> None:
        """Raises GrammarRefused. Takes up to some seconds, and what it finds out is kept in `params`."""
        try:
            params._validate_structured_outputs(self._model_config, self._config, self._tokenizer)
        except (ValueError, TypeError, KeyError, RecursionError, VLLMClientError) as error:
            raise GrammarRefused(INVALID) from error
