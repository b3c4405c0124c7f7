"""Angles and what they turn, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from vllm.config import VllmConfig, set_current_vllm_config

from omni_cluster.models.qwen3_omni.checkpoint_configs import build_config
from omni_cluster.models.qwen3_omni.fine_positions import packed
from omni_cluster.models.qwen3_omni.rotation import Rotary, StepRotation, StepTable
from omni_cluster.types.errors import ConfigError

MOST_TOKENS = 64
HEADS = 4


@pytest.fixture
def config() -> Any:
    return build_config().thinker_config.text_config


Turn = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]


def by_angles(config: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Sequence[torch.Tensor]:
    return Rotary(config.head_dim)(StepRotation(config, MOST_TOKENS)(positions), query, key)


def by_table(config: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Sequence[torch.Tensor]:
    """A step before leaves other angles in the table."""
    with set_current_vllm_config(VllmConfig()):
        table = StepTable(config, MOST_TOKENS, query.dtype)
    table(torch.full((3, MOST_TOKENS), 7))
    made: Sequence[torch.Tensor] = table.rotary(table(positions), query.clone(), key.clone())
    return made


@pytest.mark.parametrize("turn", [by_angles, by_table])
@pytest.mark.parametrize("tokens", [1, 40, MOST_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_turned_as_in_transformers(config: Any, turn: Turn, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = (torch.rand(3, tokens) * 3000).float()
    query, key = torch.randn(tokens, HEADS * config.head_dim).to(dtype), torch.randn(tokens, config.head_dim).to(dtype)
    made = turn(config, torch.from_numpy(packed(positions.numpy())), query, key)
    cos, sin = Qwen3OmniMoeThinkerTextRotaryEmbedding(config)(query, positions[:, None])
    by_head = [each.view(1, tokens, -1, config.head_dim) for each in (query, key)]
    wanted = apply_rotary_pos_emb(*by_head, cos, sin, unsqueeze_dim=2)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other.flatten(2)[0], atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)


def test_a_step_that_fills_the_buffer_looks_like_any_other_to_torch_compile(config: Any) -> None:
    """In a tensor without a gap a row is as long as the step, and what is compiled for it is wrong for other steps."""
    rotation = StepRotation(config, MOST_TOKENS)
    strides = {rotation(torch.zeros(3, tokens, dtype=torch.long)).stride() for tokens in (5, MOST_TOKENS)}
    assert strides == {(MOST_TOKENS + 1, 1)}


def test_angles_of_all_steps_lie_in_one_place(config: Any) -> None:
    rotation = StepRotation(config, MOST_TOKENS)
    places = {rotation(torch.zeros(3, tokens, dtype=torch.long)).data_ptr() for tokens in (5, MOST_TOKENS)}
    assert len(places) == 1
    with set_current_vllm_config(VllmConfig()):
        table = StepTable(config, MOST_TOKENS, torch.float32)
    before = table.rotary.cos_sin_cache.data_ptr()
    rows = {table(torch.zeros(3, tokens, dtype=torch.long)).data_ptr() for tokens in (5, MOST_TOKENS)}
    assert len(rows) == 1 and table.rotary.cos_sin_cache.data_ptr() == before


def test_frequencies_that_are_scaled_are_refused(config: Any) -> None:
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn"}
    with pytest.raises(ConfigError, match="rope_type is 'yarn', but Qwen3-Omni has no other than 'default'"):
        StepRotation(config, MOST_TOKENS)
