"""The penalties on the device against vLLM's own, which are made of lists on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.ops.penalties import apply_all_penalties

from omni_cluster.vllm_engine.worker.penalties import Penalties

VOCAB = 11
NAMES = ["plain", "repetition", "presence", "frequency", "all"]
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7),
    SamplingParams(frequency_penalty=-0.4),
    SamplingParams(repetition_penalty=0.8, presence_penalty=-1.1, frequency_penalty=0.3),
]

ids = st.integers(0, VOCAB - 1)
a_token_each = st.lists(ids, min_size=len(NAMES), max_size=len(NAMES))


def metadata(places: list[int]) -> Any:
    """What the sampler is told of the penalties of these requests."""
    kinds = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    repetition, presence, frequency = (torch.tensor([getattr(PARAMS[i], kind) for i in places]) for kind in kinds)
    return SimpleNamespace(
        no_penalties=False,
        repetition_penalties=repetition,
        presence_penalties=presence,
        frequency_penalties=frequency,
    )


def stock(logits: torch.Tensor, prompts: list[list[int]], outputs: list[list[int]], told: Any) -> torch.Tensor:
    longest = max(map(len, prompts))
    padded = torch.tensor([p + [VOCAB] * (longest - len(p)) for p in prompts])
    penalties = (told.presence_penalties, told.frequency_penalties, told.repetition_penalties)
    return apply_all_penalties(logits.clone(), padded, *penalties, outputs)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(ids, min_size=1, max_size=5), min_size=5, max_size=5),
    steps=st.lists(a_token_each, max_size=6),
    order=st.permutations(range(5)),
    resumed=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_each_request_is_penalised_as_by_vllm_whoever_is_beside_it(
    prompts: list[list[int]], steps: list[list[int]], order: list[int], resumed: int, seed: int
) -> None:
    penalties = Penalties(8, VOCAB, torch.device("cpu"))
    for name, params, prompt in zip(NAMES, PARAMS, prompts, strict=True):
        penalties.admit(name, params, prompt, ())
    for sampled in steps:
        penalties.note(NAMES, torch.tensor(sampled), torch.zeros(5, dtype=torch.bool))
        penalties.note(NAMES, torch.tensor(sampled) * 0, torch.ones(5, dtype=torch.bool))  # none of these is kept
    outputs = [[sampled[i] for sampled in steps] for i in range(5)]
    penalties.remove(NAMES[resumed])
    penalties.admit(NAMES[resumed], PARAMS[resumed], prompts[resumed], outputs[resumed])

    batch = order[: 1 + seed % 5]
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed))
    wanted = stock(logits, [prompts[i] for i in batch], [outputs[i] for i in batch], metadata(batch))
    penalties.apply(logits, [NAMES[i] for i in batch], metadata(batch))
    torch.testing.assert_close(logits, wanted, atol=0, rtol=0)


def test_what_is_removed_is_forgotten() -> None:
    penalties = Penalties(1, VOCAB, torch.device("cpu"))
    for turn in range(3):  # room for one: the second would find none
        penalties.admit(f"r{turn}", PARAMS[4], [1], [2])
        penalties.remove(f"r{turn}")
    logits = torch.ones(1, VOCAB)
    penalties.apply(logits, ["r0"], metadata([4]))
    assert torch.equal(logits, torch.ones(1, VOCAB))
