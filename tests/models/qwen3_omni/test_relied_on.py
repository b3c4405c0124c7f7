"""Until the family is registered: then `tests/vllm_engine/test_relied_on.py` asks the same of all its stages."""

from __future__ import annotations

import ast
from pathlib import Path

from omni_cluster.models.qwen3_omni import relied_on
from omni_cluster.vllm_engine.version_check import signatures_of
from tests.used_names import UsedNames, is_private, listed

FILES = ("rotation.py", "thinker_model.py", "thinker_processor.py", "thinker_stage.py")


def test_the_thinker_lists_the_private_names_that_it_uses() -> None:
    folder = Path(relied_on.__file__).parent
    of_vllm = UsedNames({name: ast.parse((folder / name).read_text()) for name in FILES})
    names = listed(relied_on.THINKER)
    assert sorted({name for name in of_vllm.members() if is_private(name)} - names) == []
    assert sorted(names - of_vllm.mentioned()) == []


def test_functions_are_called_as_they_were_when_the_version_was_checked() -> None:
    made = signatures_of(relied_on.THINKER)
    assert made and made.items() <= relied_on.SIGNATURES.items()
