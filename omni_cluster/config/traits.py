"""What a family says about the engine of one of its autoregressive stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How a stage's engine differs from a plain one.

    `hf_overrides` turns the checkpoint's config into the stage's own; `has_tokenizer` is False for stages whose
    tokens are no text; `is_compiled` is False for a model that vLLM cannot give to torch.compile. `is_host_bound`
    is True for one whose host is busier than its device up to 2,048 tokens of a step, not 1,024. `relied_on` names
    what the model uses of vLLM that vLLM does not promise to keep: members by `module:name` of their class;
    `signatures`, by `module:name.member`, how methods among these are called in the version that was checked.
    `tool_parser`: vLLM's name for how the model writes calls of tools; "" for a stage that writes none.
    """

    hf_overrides: Callable[[Any], Any] | None = None
    has_tokenizer: bool = True
    is_compiled: bool = True
    is_host_bound: bool = False
    relied_on: Mapping[str, Sequence[str]] = field(default_factory=dict)
    signatures: Mapping[str, str] = field(default_factory=dict)
    tool_parser: str = ""
