"""What sampling parameters may be: the same for the HTTP API, the configuration and the stages.

Logits are float32. A value that float32 rounds to zero or infinity would make meaningless tokens, so each bound is
far from both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from omni_cluster.types.errors import RequestError

INT32_MAX = 2**31 - 1
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKENS = 1024
MAX_BIASES = 1024
LEAST_TOP_P = 1e-6
"""Below this share only the likeliest token stays, whatever the vocabulary; smaller ones, 0 too, are raised to it."""
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers from `least` to `most`; `whole`: integers only."""

    least: float
    most: float
    whole: bool = False

    def hold(self, value: object) -> bool:
        """False for anything that is not a number, NaN included."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.least} to {self.most}"


BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1),
    "top_k": Bounds(-1, INT32_MAX, whole=True),
    "min_p": Bounds(0, 1),
    # Logits are divided and multiplied by it: a hundred times what they are is still far from float32's ends.
    "repetition_penalty": Bounds(0.01, 100),
    "presence_penalty": Bounds(-2, 2),
    "frequency_penalty": Bounds(-2, 2),
    "max_tokens": Bounds(1, INT32_MAX, whole=True),
    "min_tokens": Bounds(0, INT32_MAX, whole=True),
    "seed": Bounds(-(2**63), 2**63 - 1, whole=True),
    "logprobs": Bounds(0, 20, whole=True),
}
TOKEN_ID = Bounds(0, INT32_MAX, whole=True)
BIAS = Bounds(-1e6, 1e6)
CLIENT_BIAS = Bounds(-100, 100)
"""OpenAI's bounds of `logit_bias`."""
SWITCHES = frozenset(
    {
        *("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "skip_reading_prefix_cache"),
    }
)
_LISTS = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"})
STRUCTURE = "structured_outputs"
"""What the text must be, under one of `STRUCTURES`."""
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
APART = ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words")
"""What could forbid the only token that a structure allows, or go on behind its end: no request has both."""
OF_NO_CALL = "stop"
"""What could cut a call that is forced, within its mark too: no request has both."""
NAMES = frozenset(BOUNDS) | SWITCHES | _LISTS | {STRUCTURE}
"""vLLM's parameters that a stage takes; of the others some are the stage's own, and some change what a request is."""


def check_sampling(params: Mapping[str, Any], stage: str) -> None:
    """Raises RequestError with one sentence for the first parameter of `stage` that is none, or out of its bounds."""
    for name, wish in sampling_faults(params):
        if name not in NAMES:
            raise RequestError(f"sampling parameter {name!r} of stage {stage} is unknown; use {wish}.")
        raise RequestError(f"{name} of stage {stage} is {_shown(params[name])}, but it should be {wish}.")


def sampling_faults(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names of `params` that are none, or whose value is out of bounds, each with what it should be."""
    unknown = [(name, "vLLM's, for example temperature") for name in sorted(set(params) - NAMES)]
    known = ((name, _wish(name, value)) for name, value in params.items() if name in NAMES and value is not None)
    return unknown + [(name, wish) for name, wish in known if wish is not None]


def _wish(name: str, value: object) -> str | None:
    """What a parameter should be; None if it is that."""
    if name in BOUNDS:
        return None if BOUNDS[name].hold(value) else str(BOUNDS[name])
    if name in SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name == "bad_words":
        return None if _are_words(value) else "a list of strings, each with more than blanks"
    if name == "allowed_token_ids":
        return None if _are_token_ids(value) else "a list of token ids"
    if name == "stop":
        return None if _are_stops([value] if isinstance(value, str) else value) else _STOPS
    if name == "stop_token_ids":
        return None if _are_stop_tokens(value) else _STOP_TOKENS
    if name == STRUCTURE:
        return None if _is_structure(value) else f"one of {', '.join(STRUCTURES)}, with its value"
    if name == "logit_bias":
        return None if _are_biases(value) else f"token ids, each with {BIAS}"
    return None


_STOPS = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters"
_STOP_TOKENS = f"at most {MAX_STOP_TOKENS} token ids"


def _are_stops(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_STOPS:
        return False
    return all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in value)


def _is_structure(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(STRUCTURES)


def _are_words(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) and word.strip() for word in value)


def _are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and all(map(TOKEN_ID.hold, value))


def _are_stop_tokens(value: object) -> bool:
    return _are_token_ids(value) and len(value) <= MAX_STOP_TOKENS


def _are_biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(TOKEN_ID.hold(i) and BIAS.hold(bias) for i, bias in value.items())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
