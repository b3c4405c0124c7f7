"""Angles and what they turn, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from omni_cluster.models.qwen3_omni.checkpoint_configs import build_config
from omni_cluster.models.qwen3_omni.fine_positions import packed
from omni_cluster.models.qwen3_omni.rotation import Rotary, StepRotation
from omni_cluster.types.errors import ConfigError

MOST_TOKENS = 64
HEADS = 4


@pytest.fixture
def config() -> Any:
    return build_config().thinker_config.text_config


@pytest.mark.parametrize("tokens", [1, 40, MOST_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_turned_as_in_transformers(config: Any, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = (torch.rand(3, tokens) * 3000).float()
    query, key = torch.randn(tokens, HEADS * config.head_dim).to(dtype), torch.randn(tokens, config.head_dim).to(dtype)
    angles = StepRotation(config, MOST_TOKENS)(torch.from_numpy(packed(positions.numpy())))
    made = Rotary(config.head_dim)(angles, query, key)
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


def test_frequencies_that_are_scaled_are_refused(config: Any) -> None:
    config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn"}
    with pytest.raises(ConfigError, match="rope_type is 'yarn', but the thinker has no other than 'default'"):
        StepRotation(config, MOST_TOKENS)
