"""An engine whose layers are two groups in two processes; `cluster/test_hosts.py` has two parts of every layer."""

from __future__ import annotations

import asyncio

import pytest
import torch

from omni_cluster.engine.build import bind, make_stage
from omni_cluster.types.errors import ConfigError
from tests.engine.stages import MAX_TOKENS, pipeline_config, request, running, talker_stage, thinker_stage
from tests.engine.thinking import assert_equal, think
from tests.reference import KINDS, Reference, media, prompt_text

pytestmark = pytest.mark.full

SPLIT = {"pipeline_parallel_size": 2}


@pytest.mark.parity
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a stage of two processes needs two cards, or none")
async def test_replies_and_rows_are_the_references(reference: Reference) -> None:
    thinker = thinker_stage(max_num_batched_tokens=48).model_copy(update=SPLIT)
    async with running(pipeline_config(thinker), "thinker") as stage:
        made = await asyncio.gather(*(think(stage, request(kind, kind)) for kind in KINDS))
        for kind, each in zip(KINDS, made, strict=True):
            wanted = reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=MAX_TOKENS)
            assert_equal(each, wanted)


def test_a_stage_that_takes_rows_is_not_split_by_layers() -> None:
    talker = talker_stage().model_copy(update=SPLIT)
    with pytest.raises(ConfigError, match=r"stage 1 \(talker\): pipeline_parallel_size is 2, .* set it to 1\.$"):
        make_stage(talker, bind(pipeline_config(talker=talker)))
