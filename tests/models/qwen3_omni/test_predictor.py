"""Residual codes are transformers' where they are greedy, and drawn as transformers draws them where they are not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from omni_cluster.models.after_sampling import NO_CODE
from omni_cluster.models.checkpoint_files import load_tensors
from omni_cluster.models.qwen3_omni.predictor import TOP_K, TOP_P, CodePredictor, drawn
from omni_cluster.models.seeded_noise import exponential, state_of, token_keys

REQUESTS, WIDTH, CODES, FIRST_NOISE = 9, 32, 256, 1280


@pytest.fixture(scope="module")
def predictor(qwen3_reference: Any, qwen3_folder: Path) -> CodePredictor:
    made = CodePredictor(qwen3_reference.config.talker_config.code_predictor_config, FIRST_NOISE)
    weights = load_tensors(qwen3_folder, "talker.code_predictor.", torch.device("cpu"))
    assert made.load_weights(weights.items()) == {name for name, _ in made.named_parameters()}
    return made


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    """Of the talker and of its tokens, `[2, n, H]`."""
    return torch.randn(2, REQUESTS, WIDTH, generator=torch.Generator().manual_seed(0))


def all_of(value: bool) -> torch.Tensor:
    return torch.full((REQUESTS,), value)


def keys_of(seeds: range, frame: int = 0) -> torch.Tensor:
    states = np.array([state_of(seed) for seed in seeds], np.uint64)
    return torch.from_numpy(token_keys(states, np.full(len(states), frame)))


@torch.inference_mode()
def test_greedy_codes_are_transformers(predictor: CodePredictor, qwen3_reference: Any, states: torch.Tensor) -> None:
    theirs = qwen3_reference.talker.code_predictor
    wanted = [
        theirs.generate(inputs_embeds=states[:, i][None], max_new_tokens=3, do_sample=False) for i in range(REQUESTS)
    ]
    codes = predictor(*states, all_of(True), keys_of(range(REQUESTS)))
    assert torch.equal(codes, torch.cat(wanted)) and len(codes.unique()) > REQUESTS


@torch.inference_mode()
def test_codes_of_a_request_hang_on_its_key_and_on_no_other_request(
    predictor: CodePredictor, states: torch.Tensor
) -> None:
    greedy = torch.tensor([number % 3 == 0 for number in range(REQUESTS)])
    codes = predictor(*states, greedy, keys_of(range(REQUESTS)))
    for i in range(REQUESTS):
        one = slice(i, i + 1)
        assert torch.equal(predictor(*states[:, one], greedy[one], keys_of(range(i, i + 1))), codes[one])
    others = (keys_of(range(REQUESTS, 2 * REQUESTS)), keys_of(range(REQUESTS), frame=1))
    for keys in others:
        changed = (predictor(*states, greedy, keys) != codes).any(1)
        assert not changed[greedy].any() and changed[~greedy].sum() > 3


@torch.inference_mode()
def test_each_codebook_has_noise_of_its_own(predictor: CodePredictor, states: torch.Tensor) -> None:
    """Where all codes are as likely, the noise alone decides."""
    even = copy.deepcopy(predictor)
    even.heads.zero_()
    codes = even(*states, all_of(False), keys_of(range(REQUESTS)))
    assert len({tuple(column) for column in codes.T.tolist()}) == codes.shape[1] and len(codes.unique()) > REQUESTS


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 10.0])
def test_codes_are_drawn_by_the_chances_of_transformers(scale: float) -> None:
    """From flat logits, of which the top-k leaves most out, to steep ones, of which the top-p does."""
    logits, draws = scale * torch.randn(1, CODES, generator=torch.Generator().manual_seed(1)), 20_000
    warped = TopPLogitsWarper(TOP_P)(None, TopKLogitsWarper(TOP_K)(None, logits.clone()))
    wanted = warped.softmax(-1)[0]
    noise = exponential(torch.arange(draws) * 0x9E3779B9, torch.arange(CODES).expand(draws, -1))
    made = drawn(logits.expand(draws, -1), torch.zeros(draws, dtype=torch.bool), noise)
    shares = torch.bincount(made, minlength=CODES) / draws
    assert set(made.tolist()) <= set(wanted.nonzero().flatten().tolist())
    assert (shares - wanted).abs().sum() < 0.06


def test_codes_that_are_as_likely_as_the_last_one_are_kept_with_it() -> None:
    draws = 2_000
    noise = exponential(torch.arange(draws) * 0x9E3779B9, torch.arange(CODES).expand(draws, -1))
    made = drawn(torch.zeros(draws, CODES), torch.zeros(draws, dtype=torch.bool), noise)
    assert len(made.unique()) > CODES * 0.9


@torch.inference_mode()
def test_a_frame_enters_as_the_sum_of_its_embeddings(predictor: CodePredictor, qwen3_reference: Any) -> None:
    codes = torch.randint(CODES, (5, 3), generator=torch.Generator().manual_seed(2)).short()
    codes[2] = NO_CODE
    tables = qwen3_reference.talker.code_predictor.get_input_embeddings()
    wanted = sum(table(codes[:, i].long().clamp(min=0)) for i, table in enumerate(tables))
    wanted[2] = 0
    torch.testing.assert_close(predictor.embedded(codes), wanted)


@torch.inference_mode()
def test_nothing_is_decided_by_values(predictor: CodePredictor, states: torch.Tensor) -> None:
    """Tensors without values have shapes alone, which is what a CUDA graph keeps."""
    bare = copy.deepcopy(predictor).to("meta")
    given = [each.to("meta") for each in (*states, all_of(False), keys_of(range(REQUESTS)))]
    codes = bare(*given)
    assert (codes.device.type, codes.shape) == ("meta", (REQUESTS, 3))
    assert bare.embedded(codes.short()).shape == (REQUESTS, WIDTH)
