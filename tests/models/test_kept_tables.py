"""Tables are kept up to their bound, whatever clients send."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer

from omni_cluster.models.kept_tables import KeptTables

KIB = 1024


def table(size_bytes: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(size_bytes // 2, dtype=torch.uint8), torch.zeros(size_bytes // 2, dtype=torch.uint8))


def test_twice_the_bound_leaves_those_that_were_used_last() -> None:
    kept = KeptTables(8 * KIB)
    for number in range(16):
        kept[number] = table(KIB)
        assert kept[0]  # used each time
        assert kept.num_bytes == min(number + 1, 8) * KIB
    assert [number for number in range(16) if number in kept] == [0, *range(9, 16)]


@pytest.mark.parametrize(("size_bytes", "left"), [(9 * KIB, [0, 1]), (8 * KIB, [2]), (7 * KIB, [1, 2])])
def test_a_large_one_takes_the_place_of_small_ones_and_one_above_the_bound_of_none(
    size_bytes: int, left: list[int]
) -> None:
    kept = KeptTables(8 * KIB)
    kept[0], kept[1] = table(KIB), table(KIB)
    kept[2] = table(size_bytes)
    assert [number for number in range(3) if number in kept] == left


def test_a_table_that_is_made_again_counts_once() -> None:
    kept = KeptTables(8 * KIB)
    for _ in range(3):
        kept["same"] = table(4 * KIB)
    assert kept.num_bytes == 4 * KIB


# ------------------------------------------------------------ the angles of pictures


class Eye(Qwen2_5_VisionTransformer):
    """As much of vLLM's as makes angles."""

    def __init__(self, kept: KeptTables) -> None:
        torch.nn.Module.__init__(self)
        self.spatial_merge_size, self.patch_size, self.window_size = 2, 14, 112
        self.spatial_merge_unit = 4
        self.rotary_pos_emb = Angles()
        self._rope_by_thw_cache = kept


class Angles(torch.nn.Module):
    def get_cos_sin(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(length)[:, None] * torch.arange(1, 21)[None] / 100
        return angles.cos(), angles.sin()


def test_pictures_of_many_sizes_keep_no_more_than_the_bound_and_change_nothing() -> None:
    kept = KeptTables(1 << 20)
    eye = Eye(kept)
    sizes = [(1, 2 * h, 2 * w) for h in range(10, 22, 2) for w in range(10, 22, 2)]
    made = 0
    for size in sizes * 2:
        tables = eye.get_rope_by_thw(*size)
        made += sum(table.nbytes for table in tables)
        assert kept.num_bytes <= 1 << 20
        fresh = Eye(KeptTables(0)).get_rope_by_thw(*size)
        assert all(torch.equal(one, other) for one, other in zip(tables, fresh, strict=True))
    assert made > 2 << 20
