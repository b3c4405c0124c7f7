"""The predictor's graphs make the codes that it makes itself of the same batch."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.models.checkpoint_files import load_tensors
from omni_cluster.models.qwen3_omni import predictor_graphs
from omni_cluster.models.qwen3_omni.fused_predictor import FusedPredictor
from omni_cluster.models.qwen3_omni.predictor import CodePredictor, Given
from omni_cluster.models.qwen3_omni.predictor_graphs import PredictorGraphs
from omni_cluster.models.seeded_noise import state_of, token_keys

ROOT = Path(__file__).parents[3]
FIRST_NOISE = 1280
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Replayed:
    """What a graph does, on a device that has none: the same work on the same tensors."""

    def __init__(self, inputs: Given, work: Callable[[], torch.Tensor], pool: object) -> None:
        self.inputs, self.replay = inputs, work


def predictor_on(device: str, config: Any, folder: Path, dtype: torch.dtype) -> CodePredictor:
    made = CodePredictor(config, FIRST_NOISE)
    made.load_weights(load_tensors(folder, "talker.code_predictor.", torch.device("cpu")).items())
    angles = made.turns
    made = made.to(device=device, dtype=dtype)
    made.turns = angles.to(device)  # in float32 whatever the weights are
    return made


def given_of(requests: int, like: torch.Tensor, share_greedy: float, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, requests, like.shape[-1], generator=generator).to(like)
    greedy = torch.rand(requests, generator=generator) < share_greedy
    seeds = np.array([state_of(seed * 1000 + number) for number in range(requests)], np.uint64)
    keys = torch.from_numpy(token_keys(seeds, np.arange(requests)))
    return Given(states[0], states[1], greedy.to(like.device), keys.to(like.device))


def filled_up(given: Given, size: int) -> Given:
    room = Given.room(size, given.hidden)
    for place, each in zip(room.first_of(len(given.hidden)), given, strict=True):
        place.copy_(each)
    return room


@torch.inference_mode()
def test_what_fills_a_graph_up_and_what_was_in_its_memory_changes_no_code(
    qwen3_reference: Any, qwen3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_graphs, "CapturedWork", Replayed)
    monkeypatch.setattr(predictor_graphs, "GraphPool", object)
    config = qwen3_reference.config.talker_config.code_predictor_config
    predictor = predictor_on("cpu", config, qwen3_folder, torch.float32)
    graphs = PredictorGraphs(predictor)
    graphs.capture((1, 4, 8))
    for seed, requests in enumerate((8, 3, 1, 7, 9, 4)):
        given = given_of(requests, predictor.norm, 0.5, seed)
        assert torch.equal(graphs(given), predictor(*given))


def test_no_predictor_on_a_cpu_is_fused(qwen3_reference: Any, qwen3_folder: Path) -> None:
    config = qwen3_reference.config.talker_config.code_predictor_config
    predictor = predictor_on("cpu", config, qwen3_folder, torch.bfloat16)
    assert not FusedPredictor.fits(predictor, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("share_greedy", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_codes_of_graphs_are_those_of_the_same_kernels_without_one(
    qwen3_reference: Any, qwen3_folder: Path, dtype: torch.dtype, share_greedy: float
) -> None:
    """Of the same batch, what fills it up included: products of another shape may be rounded in another way."""
    config = qwen3_reference.config.talker_config.code_predictor_config
    predictor = predictor_on("cuda", config, qwen3_folder, dtype)
    graphs, fused = PredictorGraphs(predictor), FusedPredictor(predictor)
    graphs.capture(SIZES)
    for seed, (requests, size) in enumerate(((64, 64), (1, 1), (3, 4), (8, 8), (64, 64), (3, 4), (65, 65))):
        given = given_of(requests, predictor.norm, share_greedy, seed)
        is_fused = dtype == torch.bfloat16 and size <= max(SIZES)
        wanted = (fused if is_fused else predictor)(*filled_up(given, size))[:requests]
        assert torch.equal(graphs(given), wanted) and len(wanted.unique()) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 3, 8, 64])
@torch.inference_mode()
def test_fused_kernels_leave_the_codes_of_float32_no_sooner_than_the_predictor_does(
    qwen3_reference: Any, qwen3_folder: Path, requests: int
) -> None:
    """In bfloat16 two codes may be as likely but for roundings; a code hangs on those before it in its frame."""
    config = qwen3_reference.config.talker_config.code_predictor_config
    predictor = predictor_on("cuda", config, qwen3_folder, torch.bfloat16)
    exact, fused = copy.deepcopy(predictor).float(), FusedPredictor(predictor)
    agreed, made = {"plain": 0, "fused": 0}, 0
    for seed in range(512 // requests):
        given = given_of(requests, predictor.norm, 0.5, seed)
        wanted = exact(given.hidden.float(), given.first.float(), given.greedy, given.keys)
        for name, codes in (("plain", predictor(*given)), ("fused", fused(*given))):
            agreed[name] += int((codes == wanted).int().cumprod(1).sum())
        made += wanted.numel()
    assert 0.2 * made < agreed["plain"] < agreed["fused"] + 0.05 * made


@pytest.mark.gpu
@torch.inference_mode()
def test_graphs_of_fused_kernels_make_their_codes_whatever_is_put_in_free_memory(
    qwen3_reference: Any, qwen3_folder: Path
) -> None:
    config = qwen3_reference.config.talker_config.code_predictor_config
    predictor = predictor_on("cuda", config, qwen3_folder, torch.bfloat16)
    graphs, fused = PredictorGraphs(predictor), FusedPredictor(predictor)
    graphs.capture((1, 8))
    others = [torch.full((size,), 77, dtype=torch.int32, device="cuda") for size in (512, 4096) for _ in range(500)]
    for requests in (1, 8):
        given = given_of(requests, predictor.norm, 0.5)
        assert torch.equal(graphs(given), fused(*given))
    assert all(bool((other == 77).all()) for other in others)


def test_fused_passes_as_triton_interprets_them() -> None:
    command = [sys.executable, "-m", "tests.models.qwen3_omni.interpreted_predictor"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    assert made == ["True"] * 4
