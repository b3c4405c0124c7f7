"""The thinker over a batch of conversations with their sounds and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from training.batches import Batch
from training.pool import Pool
from training.sounds import Recordings
from training.towers import hear, see


class Media:
    """A pool's sounds and pictures on the training device."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.recordings = Recordings(pool.samples, pool.begins, device)
        self._pictures = [torch.from_numpy(picture.copy()) for picture in pool.pictures]
        self._device = device

    def pictures(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._pictures[number] for number in numbers]).to(self._device, non_blocking=True)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def think(thinker: Any, batch: Batch, media: Media, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Last hidden states `[b, n, hidden]`, and the rows of all sounds, as `hear` gives them."""
    device = thinker.lm_head.weight.device
    embeddings = thinker.model.embed_tokens(to_device(batch.ids, device))
    flat, heard = embeddings.flatten(0, 1), None
    if batch.hearings:
        heard = hear(thinker.audio_tower, *media.recordings.heard(batch.hearings, seed))
        places = to_device(batch.sound_of * heard.shape[1] + batch.sound_row, device)
        rows = heard.flatten(0, 1).index_select(0, places)
        flat = flat.index_copy(0, to_device(batch.sound_to, device), rows.to(flat.dtype))
    for size, numbers in batch.shown.items():
        rows = see(thinker.visual, media.pictures(numbers)).flatten(0, 1)
        flat = flat.index_copy(0, to_device(batch.shown_to[size], device), rows.to(flat.dtype))
    hidden = thinker.model(
        inputs_embeds=flat.view_as(embeddings), position_ids=to_device(batch.positions, device), use_cache=False
    ).last_hidden_state
    return hidden, heard
