"""What a session may give to a stage on vLLM: what the stage's spec takes, and nothing that would be dropped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from omni_cluster.models.family import EngineInput
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import PayloadError
from omni_cluster.types.rows import PrefixHashes, Rows
from omni_cluster.vllm_engine.stage_llm import check_taken
from tests.rows import KIND
from tests.vllm_engine.residual_decoder import NAME, Decoder

ROWS = Rows.of(KIND, 0, torch.ones(2, 4))
NAMED = replace(ROWS, prefix=PrefixHashes(16, ()))
IDS = Rows.of_ids(2, [5])
CODES = Codes.of(0, np.zeros((1, 3), np.int16))


def given(**parts: object) -> EngineInput:
    return EngineInput({"prompt_token_ids": [0, 1, 2]}, {}, **parts)  # type: ignore[arg-type]


class _TakesNothing(Decoder):
    reads = frozenset()
    takes_ids = False
    has_residual_codes = False


def test_what_the_spec_takes_is_given() -> None:
    check_taken(NAME, Decoder(), given(rows=(ROWS, IDS), pad_row=IDS, prompt_codes=CODES))
    check_taken(NAME, Decoder(), given(rows=(NAMED, IDS)))
    check_taken(NAME, _TakesNothing(), given())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"rows": (ROWS,)}, f"decoder was given '{KIND}' beside tokens, which its spec does not take"),
        ({"rows": (IDS,)}, "given 'ids' beside tokens"),
        ({"pad_row": IDS}, "given 'ids' beside tokens"),
        ({"prompt_codes": CODES}, "its spec has no residual codes"),
    ],
)
def test_what_the_spec_does_not_take_is_refused(parts: dict[str, object], words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        check_taken(NAME, _TakesNothing(), given(**parts))


def test_codes_of_a_prompt_go_with_no_names_of_its_blocks() -> None:
    with pytest.raises(PayloadError, match="codes of its prompt, and a prefix with its hidden states; leave one out"):
        check_taken(NAME, Decoder(), given(rows=(NAMED,), prompt_codes=CODES))
