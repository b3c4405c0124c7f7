"""What tests ask a thinker by itself."""

from __future__ import annotations

import numpy as np
import torch

from omni_cluster.models.stage import Stage
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import (
    collect,
)
from tests.reference import ThinkerReference


async def think(thinker: Stage, asked: OmniRequest) -> StageChunk:
    return await collect(thinker.generate(asked, None))


def assert_equal(made: StageChunk, wanted: ThinkerReference) -> None:
    assert list(made.token_ids) == wanted.token_ids
    assert list(made.prompt_token_ids or ()) == wanted.prompt_ids
    assert made.rows is not None and made.rows.start == 0 and made.rows.positions is not None
    assert np.array_equal(made.rows.positions, wanted.positions.numpy())
    torch.testing.assert_close(made.rows.tensor(), wanted.rows, atol=1e-4, rtol=0)
