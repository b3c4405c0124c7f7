"""What the cards of this host have."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from omni_cluster.memory.devices import CardMemory


def measure_cards() -> tuple[CardMemory, ...]:
    """The cards that this process sees, in its order; () on a host without any.

    Asked in a process of its own: a CUDA context here would keep its part of every card as long as this process lives.
    That process imports torch, which takes seconds, but vLLM need not be imported for it.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure).result()


def _measure() -> tuple[CardMemory, ...]:
    import torch

    measured = (torch.cuda.mem_get_info(card) for card in range(torch.cuda.device_count()))
    return tuple(CardMemory(total, free) for free, total in measured)
