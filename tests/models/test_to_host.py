"""Values that come from the device."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from omni_cluster.models.to_host import values_of


def test_values_have_their_shape_and_dtype() -> None:
    values = values_of(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert values.dtype == np.float32 and values.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.gpu
def test_the_thread_sleeps_until_they_are_computed() -> None:
    tensor = torch.zeros(4, device="cuda")
    tensor += 1  # a kernel that is not loaded yet waits for the device as it is launched
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, a second or more
    tensor += 1
    began_s, used_s = time.monotonic(), time.thread_time()
    assert values_of(tensor).tolist() == [2] * 4
    assert time.thread_time() - used_s < 0.25 * (time.monotonic() - began_s)
