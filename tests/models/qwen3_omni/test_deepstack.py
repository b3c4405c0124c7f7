"""What vLLM's decoder adds to its first layers where frames are, in buffers that outlive a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_cluster.models.qwen3_omni.checkpoint_configs import build_config
from omni_cluster.models.qwen3_omni.thinker_model import Qwen3OmniThinker, accepted_layer
from omni_cluster.types.errors import ConfigError

WIDTH, LEVELS, MOST_TOKENS = 4, 2, 8


class Embeddings(torch.nn.Module):
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return -input_ids[:, None].expand(-1, WIDTH).float()


class Thinker(Qwen3OmniThinker):
    """What embeds, without layers and towers."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=WIDTH))
        self.multiscale_dim, self.deepstack_num_level = WIDTH * LEVELS, LEVELS
        self.rows_out = torch.zeros(MOST_TOKENS, WIDTH)
        self.deepstack_input_embeds = [torch.zeros(MOST_TOKENS, WIDTH) for _ in range(LEVELS)]
        self.deepstack_input_embeds_num_tokens = 0

    def get_language_model(self) -> Any:
        return Embeddings()

    def added(self) -> torch.Tensor:
        """`[levels, tokens, width]`."""
        return torch.stack(self.deepstack_input_embeds)


@pytest.fixture
def thinker() -> Thinker:
    return Thinker()


def embed(thinker: Thinker, where: str, media: list[torch.Tensor]) -> torch.Tensor:
    """`where`: a letter a token, x for those of media."""
    is_media = torch.tensor([letter == "x" for letter in where])
    return thinker.embed_input_ids(torch.arange(len(where)), media, is_multimodal=is_media)


def test_frames_are_added_where_they_are_and_sound_nowhere(thinker: Thinker) -> None:
    frames, sound = torch.arange(1.0, 25).view(2, 12), torch.full((1, WIDTH), 7.0)
    made = embed(thinker, "..xx.x", [frames, sound])
    assert torch.equal(made[2:4], frames[:, :WIDTH]) and torch.equal(made[5:], sound)
    assert made[[0, 1, 4], 0].tolist() == [0, -1, -4]
    wanted = torch.zeros(LEVELS, MOST_TOKENS, WIDTH)
    wanted[:, 2:4] = frames[:, WIDTH:].unflatten(1, (LEVELS, WIDTH)).transpose(0, 1)
    assert torch.equal(thinker.added(), wanted)


@pytest.mark.parametrize(("where", "media"), [("....", []), (".x", [torch.ones(1, WIDTH)])])
def test_a_later_step_adds_no_frames_of_one_before_whose_graph_cleared_nothing(
    thinker: Thinker, where: str, media: list[torch.Tensor]
) -> None:
    embed(thinker, ".xxxxx", [torch.ones(5, WIDTH * (1 + LEVELS))])
    assert thinker.added().any()
    embed(thinker, where, media)
    assert not thinker.added().any()


def test_a_step_with_frames_has_its_own_alone(thinker: Thinker) -> None:
    embed(thinker, ".xxxxx", [torch.ones(5, WIDTH * (1 + LEVELS))])
    embed(thinker, "x.", [torch.full((1, WIDTH * (1 + LEVELS)), 2.0)])
    assert thinker.added()[:, 0].eq(2).all() and not thinker.added()[:, 1:].any()


@pytest.mark.parametrize("layer", [0, 3, 6])
def test_a_layer_that_frames_are_added_to_is_not_taken_nor_the_end_of_the_last(layer: int) -> None:
    config = build_config()
    assert accepted_layer(config) == 4
    config.talker_config.accept_hidden_layer = layer
    with pytest.raises(ConfigError, match=f"accept_hidden_layer is {layer}, but a layer of 4 to 5 can be taken"):
        accepted_layer(config)
