from __future__ import annotations

import random

import pytest
import torch

from omni_cluster.models.after_sampling import NO_CODE, Sampled
from omni_cluster.types.codes import Codes
from omni_cluster.types.rows import RESIDUAL_CODES
from omni_cluster.vllm_engine.worker.residual_codes import ResidualCodes
from omni_cluster.vllm_engine.worker.step_rows import TokenSpan

REQUESTS, POSITIONS, WIDTH = 3, 16, 2
NONE = [NO_CODE] * WIDTH


class Model:
    """Of token t it makes the codes t + 100 and t + 200."""

    def __init__(self) -> None:
        self.residual_codes = torch.zeros(32, WIDTH, dtype=torch.int16)

    def after_sampling(self, sampled: Sampled) -> torch.Tensor:
        return (sampled.token_ids[:, None] + torch.tensor([100, 200])).short()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def codes(model: Model) -> ResidualCodes:
    return ResidualCodes(model, REQUESTS, POSITIONS)


def sampled(*tokens: int) -> Sampled:
    n = len(tokens)
    ids, keys = torch.tensor(tokens, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    return Sampled(torch.zeros(n, 4), ids, torch.ones(n, dtype=torch.bool), keys)


def made_of(token: int) -> list[int]:
    return [token + 100, token + 200]


def fed(model: Model, codes: ResidualCodes, *spans: TokenSpan) -> list[list[int]]:
    codes.feed(spans)
    return model.residual_codes[: sum(span.length for span in spans)].tolist()


def make(codes: ResidualCodes, spans: list[TokenSpan], *tokens: list[int]) -> dict[str, tuple[int, list[list[int]]]]:
    """Of each request its place in the output, and the codes; `tokens` of all requests, one list after another."""
    codes.begin(spans)
    for ahead, of_all in enumerate(tokens):
        codes.make(sampled(*of_all), ahead)
    step = codes.take()
    if step is None:
        return {}
    assert step.kind == RESIDUAL_CODES and bool(step.finite.all())
    rows = step.by_request(step.rows, step.finite)
    return {name: (each.start, each.tensor().tolist()) for name, each in rows.items() if each is not None}


def test_codes_of_a_step_are_the_input_of_the_next_one_wherever_its_request_is(
    model: Model, codes: ResidualCodes
) -> None:
    codes.admit("a", 3)
    codes.admit("b", 5)
    assert fed(model, codes, TokenSpan("a", 0, 3), TokenSpan("b", 0, 5)) == [NONE] * 8
    made = make(codes, [TokenSpan("a", 3, 1), TokenSpan("b", 5, 1)], [7, 8])
    assert made == {"a": (0, [made_of(7)]), "b": (0, [made_of(8)])}
    assert fed(model, codes, TokenSpan("b", 5, 1), TokenSpan("a", 3, 1)) == [made_of(8), made_of(7)]


def test_a_step_of_several_tokens_has_as_many_codes_as_each_request_has_tokens(
    model: Model, codes: ResidualCodes
) -> None:
    codes.admit("a", 2)
    codes.admit("b", 2)
    made = make(codes, [TokenSpan("a", 4, 1), TokenSpan("b", 2, 3)], [1, 2], [50, 3], [60, 4])
    assert made == {"a": (2, [made_of(1)]), "b": (0, [made_of(2), made_of(3), made_of(4)])}
    assert fed(model, codes, TokenSpan("a", 4, 2), TokenSpan("b", 2, 3)) == [
        made_of(1), NONE, made_of(2), made_of(3), made_of(4)
    ]  # fmt: skip


def test_of_a_request_in_the_midst_of_its_prompt_nothing_is_made(model: Model, codes: ResidualCodes) -> None:
    codes.admit("a", 9, Codes.of(0, [[7, 1, 2], [7, 3, 4]]))
    assert make(codes, [TokenSpan("a", 10, 0)], [7]) == {}
    assert fed(model, codes, TokenSpan("a", 8, 4)) == [NONE, [1, 2], [3, 4], NONE]
    assert codes.take() is None


def test_some_positions_of_a_prompt_have_codes_too(model: Model, codes: ResidualCodes) -> None:
    codes.admit("a", 4, known=Codes.of(0, [[7, 1, 2]]), of_prompt=Codes.of(2, [[7, 3, 4], [7, 5, 6]]))
    assert fed(model, codes, TokenSpan("a", 0, 6)) == [NONE, NONE, [3, 4], [5, 6], [1, 2], NONE]
    codes.admit("a", 4)
    assert fed(model, codes, TokenSpan("a", 0, 6)) == [NONE] * 6


def test_a_request_gets_its_codes_back_after_a_preemption(model: Model, codes: ResidualCodes) -> None:
    codes.admit("a", 1)
    make(codes, [TokenSpan("a", 1, 1)], [7])
    codes.set_aside("a")
    for name in ("b", "c", "d"):
        codes.admit(name, 1)
        make(codes, [TokenSpan(name, 1, 1)], [9])
    codes.remove("c")
    codes.bring_back("a")
    assert fed(model, codes, TokenSpan("a", 0, 3)) == [NONE, made_of(7), NONE]
    assert len(codes) == 3


def test_places_are_used_again_and_hold_nothing_of_who_had_them(model: Model, codes: ResidualCodes) -> None:
    """Requests come, run, are preempted and leave at random, in another order of the batch each time."""
    dice, wanted, aside = random.Random(1), dict[str, list[list[int]]](), set[str]()
    for number in range(300):
        running = [name for name in wanted if name not in aside]
        if aside and len(running) < REQUESTS:
            codes.bring_back(back := dice.choice(sorted(aside)))
            aside.remove(back)
        elif len(running) < REQUESTS:
            codes.admit(name := f"r{number}", 2)
            wanted[name] = [NONE, NONE]
        elif dice.random() < 0.3:
            codes.set_aside(gone := dice.choice(running))
            aside.add(gone)
        elif dice.random() < 0.3:
            codes.remove(gone := dice.choice(sorted(wanted)))
            del wanted[gone]
            aside.discard(gone)
        batch = [name for name in wanted if name not in aside and len(wanted[name]) < POSITIONS]
        dice.shuffle(batch)
        tokens = [dice.randrange(1000) for _ in batch]
        make(codes, [TokenSpan(name, len(wanted[name]), 1) for name in batch], tokens)
        for name, token in zip(batch, tokens, strict=True):
            wanted[name].append(made_of(token))
            assert fed(model, codes, TokenSpan(name, 0, len(wanted[name]))) == wanted[name]
    for name in list(wanted):
        codes.remove(name)
    assert len(codes) == 0
    for name in ("x", "y", "z"):
        codes.admit(name, 1)
