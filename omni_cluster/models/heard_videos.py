"""Embeddings of videos that are heard: frames' and sound's in the order of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_prompt_order(
    seen: Sequence[torch.Tensor], heard: Sequence[torch.Tensor], is_sound: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Embeddings `[V + A, H]` of each video, of its frames' `[V, H]`, its sound's `[A, H]`, and which are whose."""
    lengths = [v.shape[0] + a.shape[0] for v, a in zip(seen, heard, strict=True)]
    made = []
    for frames, sound, mask in zip(seen, heard, is_sound.split(lengths), strict=True):
        # Where each token's embedding is, among the frames' and then the sound's.
        sources = torch.where(mask, frames.shape[0] + mask.cumsum(0) - 1, (~mask).cumsum(0) - 1)
        made.append(torch.cat([frames, sound])[sources.to(frames.device)])
    return tuple(made)
