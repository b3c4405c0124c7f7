"""The noise of seeds: its integers exactly, its distribution, and that what is close draws nothing alike.

Seeds are fixed, so each test gives one result. Its bound is what true noise would pass once in 10,000 tries or so.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from omni_cluster.models.seeded_noise import exponential, hashed, state_of, token_keys
from omni_cluster.vllm_engine.worker.sampled_rows import MAX_K, SampledRows
from omni_cluster.vllm_engine.worker.top_k_sampler import TopKSampler

CPU = torch.device("cpu")
SEEDS = (-1, 0, 1, 2, 7, 2**31 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
IDS = (0, 1, 2, 8447, 151_935, 2**31)
WORD, STRIDE, FACTOR = 2**64, 0x9E3779B97F4A7C15, 0xDABA0B6EB09322E3
SIDE = 64
"""Of a cube of noise: so many neighbouring seeds, token numbers and ids."""
NEIGHBOURS = [
    *(steps for steps in itertools.product((0, 1, -1), repeat=3) if steps > (0, 0, 0)),
    *(tuple(far if axis == at else 0 for at in range(3)) for axis in range(3) for far in (2, 3, 4, 8, 16, 32)),
]
"""Steps of seed, number and id, aslant too: a sum of the three would show there."""
CHI_SQUARE_255 = 370
"""What a chi-square of 255 degrees of freedom passes once in 300,000 tries: one of 31 once in 10,000."""
CHI_SQUARE_39, CHI_SQUARE_9 = 80.7, 33.8
"""Once in 10,000."""


def keys(seeds: list[int], indices: list[int]) -> torch.Tensor:
    """Of each of `seeds` with each of `indices`, int64 `[seeds * indices]`."""
    states = np.array([state_of(seed) for seed in seeds], dtype=np.uint64)
    return torch.from_numpy(token_keys(states, np.array(indices)[:, None]).T.reshape(-1).copy())


def uniform(seeds: list[int], indices: list[int], ids: list[int]) -> np.ndarray:
    """Noise `[seeds, indices, ids]` as numbers that are spread evenly between 0 and 1."""
    of_tokens = keys(seeds, indices)
    noise = exponential(of_tokens, torch.tensor(ids).expand(len(of_tokens), -1))
    return np.exp(-noise.numpy()).reshape(len(seeds), len(indices), len(ids))


def scrambled(number: int) -> int:
    for _ in range(2):
        number = (number ^ (number >> 32)) * FACTOR % WORD
    return number


def mixed(number: int) -> int:
    return (number := scrambled(number)) ^ (number >> 32)


# ------------------------------------------------------------------- integers


def test_its_integers_are_those_of_the_definition() -> None:
    for seed, index in itertools.product(SEEDS, (-3, 0, 1, 511, 2**20)):
        key = mixed((mixed((seed + STRIDE) % WORD) + index * STRIDE) % WORD)
        made = keys([seed], [index])
        assert int(made[0]) % WORD == key
        wanted = [scrambled((key + token * STRIDE) % WORD) for token in IDS]
        assert [number % WORD for number in hashed(made, torch.tensor([IDS]))[0].tolist()] == wanted


@pytest.mark.gpu
def test_a_card_makes_the_same_integers_and_noise() -> None:
    of_tokens = keys(list(SEEDS), list(range(100)))
    ids = torch.randint(151_936, (len(of_tokens), MAX_K), generator=torch.Generator().manual_seed(0))
    assert torch.equal(hashed(of_tokens.cuda(), ids.cuda()).cpu(), hashed(of_tokens, ids))
    on_card = exponential(of_tokens.cuda(), ids.cuda()).cpu()
    torch.testing.assert_close(on_card, exponential(of_tokens, ids), rtol=1e-12, atol=0)


def test_a_seed_is_its_low_64_bits_and_no_two_have_one_state() -> None:
    assert state_of(-1) == state_of(2**64 - 1) and state_of(-(2**63)) == state_of(2**63)
    assert len({state_of(seed) for seed in range(100_000)}) == 100_000
    assert len(set(keys(list(range(-50, 50)), list(range(1000))).tolist())) == 100_000


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1])
def test_no_integer_gives_noise_of_zero_or_infinity(number: int) -> None:
    key = number % WORD
    for _ in range(2):  # backwards through the steps of the hash
        key = key * pow(FACTOR, -1, WORD) % WORD
        key ^= key >> 32
    signed = torch.tensor([key - WORD if key >= WORD // 2 else key])
    assert int(hashed(signed, torch.tensor([[0]]))) == number
    assert 2.0**-53 < float(exponential(signed, torch.tensor([[0]]))) < 37


# --------------------------------------------------------------- distribution


@pytest.fixture(scope="module")
def cube() -> np.ndarray:
    """Of seeds as users choose them, with the first tokens and the first ids."""
    near = list(range(SIDE))
    return uniform(near, near, near)


def farthest(sample: np.ndarray) -> float:
    """Kolmogorov's and Smirnov's distance from an even spread, times the root of the sample's size."""
    ordered, size = np.sort(sample, axis=None), sample.size
    return float(np.abs(ordered - (np.arange(size) + 0.5) / size).max() + 0.5 / size) * math.sqrt(size)


def test_noise_is_exponential_along_seeds_numbers_and_ids(cube: np.ndarray) -> None:
    many = list(range(100_000))
    for sample in (cube, uniform(many, [0], [5]), uniform([0], many, [5]), uniform([0], [0], many)):
        assert farthest(sample) < 2.23  # once in 10,000


def test_every_token_number_and_seed_has_noise_that_is_exponential(cube: np.ndarray) -> None:
    distances = [farthest(each) for axis in range(3) for each in np.moveaxis(cube, axis, 0)]
    assert max(distances) < 2.76  # the largest of 192: once in 10,000


def test_what_is_close_is_independent(cube: np.ndarray) -> None:
    sixteenths = (cube * 16).astype(int)
    for steps in NEIGHBOURS:
        here, there = (cells.ravel() for cells in beside(sixteenths, steps))
        pairs = np.bincount(here * 16 + there, minlength=256)
        expected = here.size / 256
        assert ((pairs - expected) ** 2 / expected).sum() < CHI_SQUARE_255, steps
        correlation = np.corrcoef(*(numbers.ravel() for numbers in beside(cube, steps)))[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(here.size), steps


def beside(cube: np.ndarray, steps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Each place of the cube, and the place that is so many `steps` of seed, number and id away from it."""
    here = tuple(slice(max(-step, 0), SIDE - max(step, 0)) for step in steps)
    there = tuple(slice(max(step, 0), SIDE - max(-step, 0)) for step in steps)
    return cube[here], cube[there]


def test_each_bit_of_seed_number_and_id_changes_half_of_the_high_bits() -> None:
    base = uniform_bits(list(range(500)), 3, 5)
    changed = [uniform_bits([seed ^ (1 << bit) for seed in range(500)], 3, 5) for bit in range(64)]
    changed += [uniform_bits(list(range(500)), 3 ^ (1 << bit), 5) for bit in range(20)]
    changed += [uniform_bits(list(range(500)), 3, 5 ^ (1 << bit)) for bit in range(18)]
    for other in changed:
        flips = (base ^ other).mean(axis=0)  # of each bit, in 500 tries
        assert np.abs(flips - 0.5).max() < 5.5 * 0.5 / math.sqrt(500)


def uniform_bits(seeds: list[int], index: int, token: int) -> np.ndarray:
    """The high 32 bits of the integers, `[seeds, 32]`."""
    made = hashed(keys(seeds, [index]), torch.full((len(seeds), 1), token)).numpy().view(np.uint64)
    return (made >> np.arange(32, 64, dtype=np.uint64)) & np.uint64(1)


# ---------------------------------------------------------------------- draws


def drawn(probabilities: torch.Tensor, top_k: int, states: list[int], indices: np.ndarray) -> torch.Tensor:
    """A token for each row, int64 `[n]`, as the sampler draws it from `probabilities` `[vocab]`."""
    n = len(states)
    bounds = np.full(n, top_k, np.int32), np.ones(n, np.float32)
    rows = SampledRows.of(bounds, np.zeros(n, bool), list(states), indices, 1, CPU)
    k = torch.full((n,), top_k, dtype=torch.int32) if top_k < len(probabilities) else None
    sampler = TopKSampler(TopKTopPSampler(), lambda: (rows, 0))
    return sampler(probabilities.log().repeat(n, 1), {}, k, None)[0]


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts, expected = torch.bincount(tokens, minlength=len(probabilities)), probabilities * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("along", ["seeds", "numbers", "both"])
def test_tokens_among_few_come_as_often_as_they_are_likely(along: str) -> None:
    tries = 40_000
    likely = torch.linspace(1, 8, 40, dtype=torch.float64).softmax(0).float()
    padded = torch.cat([likely, torch.zeros(60)])  # a top-k of 40 leaves it out
    numbers = np.arange(tries)
    seeds = {"seeds": numbers, "numbers": np.zeros(tries, int), "both": numbers // 200}[along]
    indices = {"seeds": np.zeros(tries, int), "numbers": numbers, "both": numbers % 200}[along]
    tokens = drawn(padded, 40, [state_of(int(seed)) for seed in seeds], indices)
    assert int(tokens.max()) < 40
    assert chi_square(tokens, likely) < CHI_SQUARE_39


def test_tokens_of_the_whole_vocabulary_come_as_often_as_they_are_likely() -> None:
    likely = torch.cat([torch.arange(1, 11), torch.zeros(190)]) / 55
    tokens = drawn(likely, 200, [state_of(seed) for seed in range(4000)], np.zeros(4000, int))
    assert int(tokens.max()) < 10
    assert chi_square(tokens, likely[:10]) < CHI_SQUARE_9


def test_tokens_one_after_another_are_independent() -> None:
    likely = torch.full((MAX_K,), 1 / MAX_K)
    tokens = drawn(likely, MAX_K, [state_of(0)] * 40_001, np.arange(40_001)) // 4
    pairs = torch.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
    assert float(((pairs - 156.25) ** 2 / 156.25).sum()) < CHI_SQUARE_255
