"""The talker's positions of a prompt, made where its media are known: in the thinker's worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from omni_cluster.models.qwen3_omni.talker_ids import TextIds
from omni_cluster.models.qwen3_omni.talker_prompt import user_turns
from omni_cluster.models.qwen3_omni.video_tokens import prompt_positions
from omni_cluster.models.thinkers.media_places import Place


def user_positions(
    prompt_ids: Sequence[int], places: Sequence[Place], ids: TextIds, ticks_per_second: float
) -> np.ndarray:
    """The talker's M-RoPE positions of a prompt whose media stand at `places`, float32 `[3, P]`.

    They count the user's turns alone, and are zero elsewhere. The thinker's cannot be shifted to them: sums of floats
    depend on what they begin with.
    """
    is_user = user_turns(np.array(prompt_ids, np.int64), ids)
    before = np.cumsum(is_user) - is_user
    own = [replace(place, offset=int(before[place.offset])) for place in places if is_user[place.offset]]
    made = np.zeros((3, len(is_user)), np.float32)
    made[:, is_user] = prompt_positions(int(is_user.sum()), own, ticks_per_second)
    return made
