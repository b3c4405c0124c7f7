"""What vLLM keeps of earlier requests stays within the configuration's bounds, when twice as much is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import xgrammar
from transformers import AutoTokenizer
from vllm import envs
from vllm.config import VllmConfig
from vllm.multimodal.cache import engine_receiver_cache_from_config, processor_cache_from_config
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from omni_cluster.config.limits import Limits
from omni_cluster.engine.build import bind
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from tests.engine.stages import pipeline_config

MIB = 1 << 20
ITEM_BYTES = MIB // 8
GROWTH = """
import random, sys
from pathlib import Path
import psutil
from omni_cluster.models.chat_files import FileTokenizer

def words(count):
    return " ".join(chance.randbytes(250).translate(letters).decode() for _ in range(count))

letters = bytes(ord("a") + byte % 26 for byte in range(256))
tokenizer, chance = FileTokenizer(Path(sys.argv[1])).backend_tokenizer, random.Random(0)
for _ in range(2):
    tokenizer.encode(words(5000))
before = psutil.Process().memory_info().rss
for _ in range(4):
    tokenizer.encode(words(5000))
print(psutil.Process().memory_info().rss - before)
"""


@pytest.fixture
def bounded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """The thinker's, with a MiB for each cache."""
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "512")  # put back at the end
    bound = bind(pipeline_config(limits=Limits(kept_media_bytes=MIB, kept_grammars_bytes=MIB)))
    thinker = bound.config.stages[0]
    spec = cast(ARSpec, bound.spec(thinker))
    return OmniEngineArgs.for_ar_stage(thinker, bound.config, str(tiny), spec).create_engine_config()


def item() -> MultiModalKwargsItem:
    data = torch.zeros(ITEM_BYTES, dtype=torch.uint8)
    return MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data, MultiModalBatchedField())})


def test_both_ends_of_an_engine_keep_the_same_media_of_a_bounded_size(bounded: VllmConfig) -> None:
    sender = processor_cache_from_config(bounded)
    receiver = engine_receiver_cache_from_config(bounded)
    assert sender is not None and receiver is not None
    for number in range(2 * MIB // ITEM_BYTES):
        sent, _ = sender.get_and_update_item((item(), []), str(number))
        receiver.get_and_update_item(sent, str(number))
        assert receiver._cache.currsize <= MIB  # type: ignore[attr-defined]
    kept = [str(number) for number in range(2 * MIB // ITEM_BYTES) if sender.is_cached_item(str(number))]
    assert kept == sorted(receiver._cache, key=int)  # type: ignore[attr-defined]
    assert 0 < len(kept) <= MIB // ITEM_BYTES


def test_compiled_grammars_are_kept_up_to_a_size(bounded: VllmConfig, tiny: Path) -> None:
    assert int(os.environ["VLLM_XGRAMMAR_CACHE_MB"]) == envs.VLLM_XGRAMMAR_CACHE_MB == 1
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(tiny))
    # As vLLM makes it.
    compiler = xgrammar.GrammarCompiler(
        vocabulary, max_threads=1, cache_enabled=True, cache_limit_bytes=envs.VLLM_XGRAMMAR_CACHE_MB * MIB
    )
    made = number = 0
    while made < 2 * MIB:
        made += compiler.compile_json_schema(json.dumps(schema(number))).memory_size_bytes
        number += 1
        assert compiler.get_cache_size_bytes() <= MIB


@pytest.mark.full
def test_words_that_were_tokenized_are_kept_up_to_a_number(tiny: Path) -> None:
    """Of 10,000 in `tokenizers`: 20,000 more, 120 MiB as they would be kept, take no further memory."""
    # In a process of its own: in this one other threads take and free memory meanwhile. Allocators keep some 20 MiB.
    run = subprocess.run([sys.executable, "-c", GROWTH, tiny], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 60 * MIB


def schema(number: int) -> dict[str, Any]:
    names = [f"field_{number}_{i}" for i in range(40)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
