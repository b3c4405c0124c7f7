"""The device-side repetition penalty against vLLM's own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.penalties import apply_all_penalties

from omni_cluster.vllm_engine.worker.seen_tokens import SeenTokens

VOCAB = 11
NONE_DISCARDED = torch.zeros(3, dtype=torch.bool)


def stock(
    logits: torch.Tensor, prompts: list[list[int]], outputs: list[list[int]], penalties: list[float]
) -> torch.Tensor:
    longest = max(map(len, prompts))
    padded = torch.tensor([p + [VOCAB] * (longest - len(p)) for p in prompts])
    none = torch.zeros(len(prompts))
    return apply_all_penalties(logits.clone(), padded, none, none, torch.tensor(penalties), outputs)


def tracker(prompts: dict[str, list[int]]) -> SeenTokens:
    seen = SeenTokens(4, VOCAB, torch.device("cpu"))
    for name, prompt in prompts.items():
        seen.admit(name, prompt)
    return seen


ids = st.integers(0, VOCAB - 1)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(ids, min_size=1, max_size=5), min_size=3, max_size=3),
    steps=st.lists(st.lists(ids, min_size=3, max_size=3), max_size=6),
    seed=st.integers(0, 99),
)
def test_penalty_is_vllms_for_prompt_and_output_tokens(
    prompts: list[list[int]], steps: list[list[int]], seed: int
) -> None:
    names, penalties = ["a", "b", "c"], [1.05, 2.0, 1.0]
    seen = tracker({n: p for n, p in zip(names, prompts, strict=True) if n != "c"})
    for sampled in steps:
        seen.note(names, torch.tensor(sampled), NONE_DISCARDED)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed))
    outputs = [[sampled[i] for sampled in steps] for i in range(3)]
    wanted = stock(logits, prompts, outputs, penalties)
    seen.penalise(logits, names, torch.tensor(penalties))
    torch.testing.assert_close(logits, wanted, atol=0, rtol=0)


def seen_by(seen: SeenTokens, name: str) -> set[int]:
    logits = torch.ones(1, VOCAB)
    seen.penalise(logits, [name], torch.tensor([2.0]))
    return set(torch.nonzero(logits[0] != 1).flatten().tolist())


def test_discarded_tokens_do_not_count() -> None:
    seen = tracker({"a": [1], "b": [2]})
    seen.note(["b", "a"], torch.tensor([5, 6]), torch.tensor([True, False]))
    assert seen_by(seen, "a") == {1, 6} and seen_by(seen, "b") == {2}


def test_the_batchs_order_may_change_between_steps() -> None:
    seen = tracker({"a": [1], "b": [2]})
    seen.note(["a", "b"], torch.tensor([3, 4]), NONE_DISCARDED[:2])
    seen.note(["b", "a"], torch.tensor([5, 6]), NONE_DISCARDED[:2])
    assert seen_by(seen, "a") == {1, 3, 6} and seen_by(seen, "b") == {2, 4, 5}


def test_a_row_that_is_used_again_is_clean() -> None:
    seen = tracker({"a": [1]})
    seen.remove("a")
    for name in ("b", "c", "d", "e"):
        seen.admit(name, [7])
    assert all(seen_by(seen, name) == {7} for name in ("b", "c", "d", "e")) and len(seen) == 4


def test_a_request_that_starts_over_has_the_tokens_it_is_given() -> None:
    seen = tracker({"a": [1]})
    seen.note(["a"], torch.tensor([3]), NONE_DISCARDED[:1])
    seen.admit("a", [1, 4])
    assert seen_by(seen, "a") == {1, 4} and len(seen) == 1
