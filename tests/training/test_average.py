"""An average forgets the oldest weights."""

from __future__ import annotations

import pytest
import torch

from training.average import Average


def test_the_average_is_of_the_last_tenth_of_the_steps_and_of_no_more_than_asked_for() -> None:
    def lag(steps: int, taken: int) -> float:
        """By how many steps the average is behind weights that grow by one each."""
        model = torch.nn.Linear(1, 1, bias=False)
        average = Average(model, steps)
        for value in range(taken):
            torch.nn.init.constant_(model.weight, value)
            average.update()
        return taken - 1 - average.state_dict()["weight"].item()

    assert lag(steps=1000, taken=10) == 0
    assert lag(steps=1000, taken=300) == pytest.approx(300 / 11, rel=0.1)
    assert lag(steps=20, taken=300) == pytest.approx(19, rel=0.1)
