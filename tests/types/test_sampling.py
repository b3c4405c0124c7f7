"""Bounds of sampling parameters: the same at the HTTP door, in a configuration and in a stage."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm._custom_ops import apply_repetition_penalties

from omni_cluster.config.schema import StageConfig
from omni_cluster.openai_api.wire import Sampling, StageSampling
from omni_cluster.types.errors import RequestError
from omni_cluster.types.sampling import BOUNDS, NAMES, SWITCHES, check_sampling

ODD = [0, -1, 1e-300, 5e-324, 1e-45, 1.1e-38, 1e-10, 0.009, 0.01, 0.5, 1, 2, 2.1, 100, 101, 1e38, 1e308, 2**31, 2**63]
ODD += [-(2**63), -(2**63) - 1, 10**40, True, "1", math.nan, math.inf, -math.inf, [1], {}]


def a_stage_takes(name: str, value: object) -> bool:
    try:
        check_sampling({name: value}, "talker")
    except RequestError as error:
        assert str(error).startswith(f"{name} of stage talker is ") and str(error).endswith(".")
        return False
    return True


def the_door_takes(name: str, value: object) -> bool:
    """Whether a stage gets it: what asks for nothing is passed over."""
    try:
        return name in StageSampling.model_validate({name: value}).given()
    except ValidationError:
        return False


def a_configuration_takes(name: str, value: object) -> bool:
    try:
        StageConfig(stage_id=0, model_stage="talker", num_gpus=0, default_sampling_params={name: value})
    except ValidationError as error:
        assert f"default_sampling_params.{name}" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", sorted(set(BOUNDS) & set(StageSampling.model_fields)))
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_door_configuration_and_stage_take_the_same(name: str, value: object) -> None:
    taken = a_stage_takes(name, value)
    asks_nothing = name == "seed" and value == -1
    assert the_door_takes(name, value) is (taken and not asks_nothing)
    assert a_configuration_takes(name, value) is taken


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("stop", "x", True),
        ("stop", ["x"] * 4, True),
        ("stop", ["x"] * 5, False),
        ("stop", "", False),
        ("stop", "x" * 256, True),
        ("stop", "x" * 257, False),
        ("stop", 5, False),
        ("bad_words", ["x"], True),
        ("bad_words", ["x", " "], False),
        ("stop_token_ids", [0] * 64, True),
        ("stop_token_ids", [0] * 65, False),
        ("stop_token_ids", [-1], False),
        ("stop_token_ids", [True], False),
        ("stop_token_ids", [2**31], False),
    ],
)
def test_door_configuration_and_stage_take_the_same_lists(name: str, value: object, taken: bool) -> None:
    assert [takes(name, value) for takes in (a_stage_takes, the_door_takes, a_configuration_takes)] == [taken] * 3


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        *((name, value, isinstance(value, bool)) for name in sorted(SWITCHES) for value in (True, False, 0, "no", [])),
        ("bad_words", ["a", "b"], True),
        ("bad_words", "a", False),
        ("bad_words", [1], False),
        ("allowed_token_ids", [0, 5], True),
        ("allowed_token_ids", [1.5], False),
        ("allowed_token_ids", [True], False),
        ("allowed_token_ids", 5, False),
    ],
)
def test_a_value_of_another_type_never_reaches_an_engine(name: str, value: object, taken: bool) -> None:
    """Engines read no request any more after one that they cannot read."""
    assert [takes(name, value) for takes in (a_stage_takes, a_configuration_takes)] == [taken] * 2
    assert name not in Sampling.model_fields or the_door_takes(name, value) is taken


def test_each_name_for_clients_is_one_of_a_stage() -> None:
    assert set(StageSampling.model_fields) <= NAMES


@pytest.mark.parametrize("name", ["n", "extra_args", "trace_decode_token_ids", "output_kind", "temprature"])
def test_what_is_no_parameter_of_a_stage_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"sampling parameter '{name}' of stage talker is unknown"):
        check_sampling({name: 1}, "talker")


def test_text_is_always_made_of_tokens() -> None:
    assert StageSampling.model_validate({"detokenize": True}).given() == {}
    with pytest.raises(ValidationError, match="should be true, or left out"):
        StageSampling.model_validate({"detokenize": False})


def test_biases_are_finite() -> None:
    check_sampling({"logit_bias": {3: 1e4}}, "talker")
    with pytest.raises(RequestError, match="logit_bias of stage talker is"):
        check_sampling({"logit_bias": {3: math.inf}}, "talker")


@given(st.floats(0.01, 100), st.floats(0.01, 2), st.floats(-2, 2), st.lists(st.floats(-1e4, 1e4, width=32), min_size=1))
def test_logits_stay_finite_within_the_bounds(
    repetition: float, temperature: float, penalty: float, values: list[float]
) -> None:
    logits: Any = torch.tensor([values])
    seen = torch.ones_like(logits, dtype=torch.bool)
    apply_repetition_penalties(logits, seen, seen, torch.tensor([repetition]))
    logits = (logits - penalty * 4096) / torch.tensor(temperature)
    assert np.isfinite(logits.numpy()).all() and torch.isfinite(logits.softmax(-1)).all()
