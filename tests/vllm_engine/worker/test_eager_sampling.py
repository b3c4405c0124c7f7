from __future__ import annotations

import torch
from vllm.v1.sample import sampler

from omni_cluster.vllm_engine.worker.eager_sampling import sample_eagerly


def test_no_request_waits_for_a_compiler() -> None:
    sample_eagerly()
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 9.0]])
    with torch.compiler.set_stance("fail_on_recompile"):
        ranks = sampler.batched_count_greater_than(logits, torch.tensor([[2.0], [0.0]]))
    assert ranks.tolist() == [2, 3]


def test_called_again_it_changes_nothing() -> None:
    sample_eagerly()
    before = sampler.batched_count_greater_than
    sample_eagerly()
    assert sampler.batched_count_greater_than is before
