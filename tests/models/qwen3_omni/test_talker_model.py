from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, Qwen3OmniMoeConfig
from vllm.model_executor.models.utils import AutoWeightsLoader

from omni_cluster.models.checkpoint_files import load_tensors, read_config
from omni_cluster.models.qwen3_omni.predictor import CodePredictor
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.talker_model import (
    ARCHITECTURE,
    TEXT_TABLE,
    Qwen3OmniTalker,
    never_sampled,
    own_weights,
    spread_gates,
    talker_config,
)
from omni_cluster.models.qwen3_omni.talker_stage import talker_sizes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(qwen3_folder: Path) -> Any:
    return AutoConfig.from_pretrained(qwen3_folder)


def test_talkers_config_is_its_part_of_the_checkpoints(config: Any, qwen3_folder: Path) -> None:
    made = talker_config(config)
    assert made is config.talker_config.text_config and made.architectures == [ARCHITECTURE]
    assert made.talker_ids == TalkerIds.from_config(read_config(qwen3_folder))
    assert made.code_predictor_config.num_code_groups == 4
    assert (made.thinker_hidden_size, made.talker_ids.text.num_ids) == (64, 448)


def test_rotary_positions_in_the_hubs_form_are_read(qwen3_folder: Path) -> None:
    """The hub's file is of an older transformers, which had the base beside the rest."""
    old = read_config(qwen3_folder)
    axes = {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default", "type": "default"}
    for part, scaling in (("text_config", axes), ("code_predictor_config", None)):
        of_part = old["talker_config"][part]
        del of_part["rope_parameters"]
        of_part |= {"rope_theta": 500_000.0, "rope_scaling": scaling}
    made = talker_config(Qwen3OmniMoeConfig.from_dict(old))
    assert made.rope_parameters.items() >= {**axes, "rope_theta": 500_000.0}.items()
    assert made.code_predictor_config.rope_parameters["rope_theta"] == 500_000.0


def test_talkers_config_stays_as_it_is(config: Any) -> None:
    made = talker_config(config)
    ids = made.talker_ids
    assert talker_config(made) is made and made.talker_ids is ids


def test_a_config_that_says_nothing_gets_the_architecture() -> None:
    assert talker_config(PreTrainedConfig()).architectures == [ARCHITECTURE]


def test_what_transformers_suppresses_is_never_sampled(config: Any) -> None:
    talker = config.talker_config
    size = talker.text_config.vocab_size
    suppressed = [i for i in range(size - 1024, size) if i != talker.codec_eos_token_id]  # as its `generate` does
    mask = never_sampled(size, TalkerIds.from_config(config.to_dict()).codec)
    assert mask.nonzero().flatten().tolist() == suppressed


def test_only_what_the_talker_reads_is_used_of_the_checkpoint(qwen3_folder: Path) -> None:
    with safe_open(qwen3_folder / "model.safetensors", "pt") as file:
        used = {name for name in file.keys() if not Qwen3OmniTalker.is_unused_checkpoint_weight(name)}  # noqa: SIM118
    assert {name.split(".")[0] for name in used - {TEXT_TABLE}} == {"talker"} and TEXT_TABLE in used


def test_the_predictor_is_loaded_though_files_have_it_apart(config: Any, qwen3_folder: Path) -> None:
    """As where a file of a checkpoint ends within it: each has its names in order."""
    given = [(f"talker.{name}", each) for name, each in load_tensors(qwen3_folder, "talker.", CPU).items()]
    own = [(name, each) for name, each in given if name.startswith("talker.code_predictor.")]
    head = next((name, each) for name, each in given if name == "talker.codec_head.weight")
    talker = nn.Module()
    talker.code_predictor = CodePredictor(talker_config(config).code_predictor_config, 0)
    talker.codec_head = nn.Linear(*reversed(head[1].shape), bias=False)
    model = nn.ModuleDict({"talker": talker})
    loaded = AutoWeightsLoader(model).load_weights(own_weights([*own[:5], head, *own[5:]], []))
    assert loaded == {name for name, _ in model.named_parameters()}
    assert torch.equal(talker.code_predictor.heads[2], dict(own)["talker.code_predictor.lm_head.2.weight"])


def test_sizes_of_the_hubs_checkpoint() -> None:
    """The facts that are published of it, and what was counted of its modules."""
    text = {
        "vocab_size": 3072, "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 768, "max_position_embeddings": 65_536,
    }  # fmt: skip
    predictor = {"num_hidden_layers": 5, "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 16}
    talker = {"text_config": text, "code_predictor_config": predictor, "thinker_hidden_size": 2048}
    made = talker_sizes({"talker_config": talker, "thinker_config": {"text_config": {"vocab_size": 152_064}}})
    assert made.intermediate_size == 6 * 384 + 768 and made.rows_size == 2048 and made.residual_codes == 15
    assert made.buffers_size == 128
    assert made.made_elements * 2 == 311_427_072 and made.request_elements * 2 == 16 * 20_480


class Gate(nn.Linear):
    """As vLLM's layers, which give the product and what is to be added to it."""

    def forward(self, states: torch.Tensor) -> Any:
        return super().forward(states), None


def test_the_last_bit_of_a_gate_hangs_on_no_other_position() -> None:
    dice = torch.Generator().manual_seed(0)
    gate, states = Gate(1, 1, bias=False), torch.randn(340, 1, generator=dice)  # an exact product
    with torch.no_grad():
        gate.weight.fill_(1)
    spread_gates(nn.ModuleDict({"0": nn.ModuleDict({"mlp": nn.ModuleDict({"shared_expert_gate": gate})})}), 32)
    alone = torch.cat([gate(state)[0].sigmoid() for state in states.split(1)])
    assert alone.shape == (340, 32) and torch.equal(alone, alone[:, :1].expand(-1, 32))
    for number in range(1, 340):
        assert torch.equal(gate(states[:number])[0].sigmoid(), alone[:number])
