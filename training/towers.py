"""The thinker's towers over many sounds and pictures at once: transformers' own go through them one window at a time.

The layers are transformers', and so are the values; a batch of windows is attended to under a mask.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import gelu, pad, scaled_dot_product_attention
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import apply_rotary_pos_emb_vision

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
PATCH: Final = 14
MERGE: Final = 2


def hear(tower: Any, features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    """Features `[n, 128, frames]`, zero behind each sound's own `frames` -> rows `[n, tokens, width]`.

    Those behind each sound's own tokens are noise.
    """
    window = 2 * tower.n_window
    count, bins = features.shape[:2]
    features = pad(features, (0, -features.shape[2] % window))
    windows = features.unflatten(2, (-1, window)).transpose(1, 2).reshape(-1, bins, window)
    starts = torch.arange(0, features.shape[2], window, device=features.device)
    lengths = (frames[:, None] - starts).clamp(0, window).flatten()
    hidden = _convolved(tower, windows, lengths)
    valid = torch.arange(hidden.shape[1], device=hidden.device) < ((lengths + 1) // 2)[:, None]
    valid[:, 0] = True  # a window without a sound attends to something, too
    for layer in tower.layers:
        hidden = _heard_layer(layer, hidden, valid[:, None, None])
    pooled = hidden.unflatten(1, (-1, 2)).mean(2)
    return tower.proj(tower.ln_post(pooled)).reshape(count, -1, tower.proj.out_features)


def _convolved(tower: Any, windows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    within = torch.arange(windows.shape[2], device=windows.device) < lengths[:, None]
    hidden = gelu(tower.conv1(windows)) * within[:, None]
    hidden = gelu(tower.conv2(hidden)).transpose(1, 2)
    return hidden + tower.positional_embedding.positional_embedding[: hidden.shape[1]]


def _heard_layer(layer: Any, hidden: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    attention = layer.self_attn
    normed = layer.self_attn_layer_norm(hidden)
    query, key, value = (
        projection(normed).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended = scaled_dot_product_attention(query, key, value, attn_mask=valid)
    hidden = hidden + attention.out_proj(attended.transpose(1, 2).flatten(2))
    return hidden + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))))


def see(tower: Any, pictures: torch.Tensor) -> torch.Tensor:
    """Pictures of one size, uint8 `[n, height, width, 3]` -> rows `[n, tokens, width]`.

    For a tower whose layers all attend to the whole picture.
    """
    count, (height, width) = len(pictures), (side // PATCH for side in pictures.shape[1:3])
    hidden = tower.patch_embed(_patches(pictures)).unflatten(0, (count, -1))
    angles = _angles(height, width, tower.blocks[0].attn.head_dim, pictures.device)
    for block in tower.blocks:
        hidden = hidden + _seen(block.attn, block.norm1(hidden), angles)
        hidden = hidden + block.mlp(block.norm2(hidden))
    return tower.merger(hidden).unflatten(0, (count, -1))


def _angles(height: int, width: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[patches, head_dim]` of each patch's row and column, tile by tile."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    turned = [_tile_by_tile(places)[:, None] * frequencies for places in (rows, columns)]
    angles = torch.cat(turned * 2, dim=1).to(device)
    return angles.cos(), angles.sin()


def _tile_by_tile(places: torch.Tensor) -> torch.Tensor:
    return places.unflatten(1, (-1, MERGE)).unflatten(0, (-1, MERGE)).transpose(1, 2).flatten()


def _seen(attention: Any, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    query, key, value = (
        projection(hidden).unflatten(2, (attention.num_heads, -1))
        for projection in (attention.q, attention.k, attention.v)
    )
    query, key = apply_rotary_pos_emb_vision(query, key, *angles)
    attended = scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    return attention.proj(attended.transpose(1, 2).flatten(2))


def _patches(pictures: torch.Tensor) -> torch.Tensor:
    """As the processor normalizes and orders them: `[n * patches, 1176]`."""
    mean, std = (torch.tensor(each, device=pictures.device) for each in (CLIP_MEAN, CLIP_STD))
    normal = ((pictures.float() / 255 - mean) / std).permute(0, 3, 1, 2)
    tiles = normal.unflatten(3, (-1, MERGE, PATCH)).unflatten(2, (-1, MERGE, PATCH))
    # picture, colour, tile row, row in tile, y, tile column, column in tile, x
    ordered = tiles.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    return ordered.expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(-1, 3 * 2 * PATCH * PATCH)
