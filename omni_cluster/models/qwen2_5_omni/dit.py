"""The flow-matching DiT of code2wav, over packed blocks.

The reference's attention never reaches past a neighbouring block of 24 mel frames. So a batch is a plain list of
blocks, `[N, 24]` frames, of any number of requests and of any lengths, and three indices a block say which blocks are
its neighbours: there is no padding between requests, and no mask of all frames by all frames. A block's left
neighbour may also be one that was computed earlier, in a stream's last piece: its keys and values are kept for that.

What does not change over the evaluations of one sample (speaker encoding, code embedding, time modulation, rotary
table) is computed when the model is loaded, or once a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from omni_cluster.kernels import float8
from omni_cluster.kernels.float8 import Float8Rows
from omni_cluster.models.qwen2_5_omni import dit_kernels
from omni_cluster.models.qwen2_5_omni.dit_resident_kernel import ResidentLayers
from omni_cluster.models.qwen2_5_omni.voices import Voice

GUIDANCE_SCALE = 0.5
NORM_EPS = 1e-6
NO_BLOCK = -1
FIRST_SLOT = -2
"""A left neighbour of FIRST_SLOT - s is the block that slot s of the stream store keeps."""
BLOCK_ROWS = 6
"""Of a table of blocks, before its codes."""
Rows = torch.Tensor | Float8Rows


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """N blocks of a batch, each int32 `[N]` on the device but for codes.

    `previous`, `following`: a neighbour's place in the batch, NO_BLOCK without one; `previous` may be a slot of the
    stream store. `length`: frames of the block that are there. `keep`: the slot that keeps the block, NO_BLOCK for
    none. `voice`: row of the voice. `step`: of the flow, the next one that the block's job takes.
    `codes` int32 `[N, codes of a block]`.
    """

    previous: torch.Tensor
    following: torch.Tensor
    length: torch.Tensor
    keep: torch.Tensor
    voice: torch.Tensor
    step: torch.Tensor
    codes: torch.Tensor

    @classmethod
    def of(cls, table: torch.Tensor) -> PackedBlocks:
        """Views of a table `[rows, N]`: a row for each field, in their order, and one for each code of a block."""
        previous, following, length, keep, voice, step = table[:BLOCK_ROWS]
        return cls(previous, following, length, keep, voice, step, table[BLOCK_ROWS:].T)


@dataclass(frozen=True, slots=True)
class DiTLayer:
    """Weights of one layer, in float8 or not. `qkv`: query, key and value as one product."""

    qkv: Rows
    qkv_bias: torch.Tensor
    out: Rows
    out_bias: torch.Tensor
    up: Rows
    up_bias: torch.Tensor
    down: Rows
    down_bias: torch.Tensor
    looks_back: bool
    looks_ahead: bool


class BlockDiT:
    """Computes what transformers' `Qwen2_5OmniToken2WavDiTModel` does, at fixed points of time.

    Products are in `dtype`; the residual stream, norms and modulation in float32. `slots`: how many streams can be
    kept between pieces. `resident_blocks`: on CUDA the layers of so many blocks at most are one kernel. `in_float8`:
    products of the layers are, and `dtype` is bfloat16; those of the one kernel stay in `dtype`.
    """

    def __init__(
        self,
        dit: Any,
        voices: Sequence[Voice],
        times: torch.Tensor,
        dtype: torch.dtype,
        slots: int,
        resident_blocks: int = 0,
        in_float8: bool = False,
    ) -> None:
        config = dit.config
        self.mel_dim, self.block_size, self.repeats = dit.mel_dim, dit.block_size, dit.repeats
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.dtype, self.in_float8 = dtype, in_float8
        layers = [self._layer(block, in_float8) for block in dit.transformer_blocks]
        modulation = _modulation(dit, times)
        self.modulation = [layer.chunk(6, dim=-1) for layer in modulation]
        self.resident_blocks = resident_blocks
        self.resident: ResidentLayers | None = None
        if resident_blocks:
            plain = [self._layer(block, False) for block in dit.transformer_blocks] if in_float8 else layers
            self.resident = ResidentLayers(plain, modulation, self.num_heads, self.block_size)
        self.layers = self.resident.layers if self.resident and not in_float8 else layers
        self.final_modulation = _final_modulation(dit, times)
        self._embed_inputs(dit, voices)
        self.proj_out, self.proj_out_bias = self._cast(dit.proj_out)
        self.rotary = _rotary_table(dit, 3 * self.block_size)
        back = sum(layer.looks_back for layer in self.layers)
        inner = self.num_heads * self.head_dim
        # One slot more, never read: blocks that are not kept need no branch.
        self.store = torch.zeros(
            len(times), back, slots, 2, self.block_size, 2, inner, dtype=dtype, device=times.device
        )

    def _layer(self, block: Any, in_float8: bool) -> DiTLayer:
        attention, ff = block.attn, block.ff.ff
        qkv = (attention.to_q, attention.to_k, attention.to_v)
        weights, biases = [p.weight.detach() for p in qkv], [p.bias.detach() for p in qkv]
        for i in (0, 1):  # query and key
            weights[i], biases[i] = (_deinterleaved(p, self.head_dim) for p in (weights[i], biases[i]))
        return DiTLayer(
            self._rounded(torch.cat(weights), in_float8),
            torch.cat(biases).to(self.dtype),
            *self._of_layer(attention.to_out[0], in_float8),
            *self._of_layer(ff[0], in_float8),
            *self._of_layer(ff[3], in_float8),
            looks_back=block.look_backward_block > 0,
            looks_ahead=block.look_ahead_block > 0,
        )

    def _of_layer(self, linear: nn.Linear, in_float8: bool) -> tuple[Rows, torch.Tensor]:
        return self._rounded(linear.weight.detach(), in_float8), linear.bias.detach().to(self.dtype)

    def _rounded(self, weight: torch.Tensor, in_float8: bool) -> Rows:
        return float8.quantized(weight) if in_float8 else weight.to(self.dtype)

    def _cast(self, linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        return linear.weight.detach().to(self.dtype), linear.bias.detach().to(self.dtype)

    def _embed_inputs(self, dit: Any, voices: Sequence[Voice]) -> None:
        """Splits the input projection by what it is given: only the state changes from evaluation to evaluation."""
        embed, config = dit.input_embed, dit.config
        state, encoded, code, conditioning = embed.proj.weight.detach().split(
            [config.mel_dim, config.enc_dim, config.emb_dim, config.enc_emb_dim], dim=1
        )
        table = dit.text_embed.codec_embed.weight.detach()
        self.state_in = state.to(self.dtype)
        self.code_rows = table @ code.T  # [codes + 1, hidden]
        self.num_codes = len(table)
        guided, unguided = [], []
        for voice in voices:
            mel = voice.reference_mel.to(embed.proj.weight)
            given = voice.conditioning.to(embed.proj.weight) @ conditioning.T
            guided.append(embed.spk_encoder(mel) @ encoded.T + given)
            unguided.append(embed.spk_encoder(torch.zeros_like(mel)) @ encoded.T + self.code_rows[:1])
        self.guided_rows = (torch.cat(guided) + embed.proj.bias).detach()  # [voices, hidden]
        self.unguided_rows = (torch.cat(unguided) + embed.proj.bias).detach()

    def conditions(self, blocks: PackedBlocks) -> torch.Tensor:
        """What codes and voices add to the projected state, guided and unguided: float32 `[2, N * 24, hidden]`."""
        codes = self.code_rows[blocks.codes].repeat_interleave(self.repeats, dim=1)  # [N, 24, hidden]
        guided = codes + self.guided_rows[blocks.voice].unsqueeze(1)
        unguided = self.unguided_rows[blocks.voice].unsqueeze(1).expand_as(guided)
        return torch.stack([guided, unguided]).flatten(1, 2)

    def velocity(
        self, point: torch.Tensor, state: torch.Tensor, conditions: torch.Tensor, blocks: PackedBlocks
    ) -> torch.Tensor:
        """The guided velocity field: float32 `[N * 24, 80]` -> the same.

        `point`: int64 `[N]`, each block's number in the times at which the velocity is evaluated.
        """
        hidden = (F.linear(state.to(self.dtype), self.state_in).float() + conditions).flatten(0, 1)
        final_scale, final_shift = self.final_modulation
        if self.resident is not None and hidden.is_cuda and point.shape[0] <= self.resident_blocks:
            out = self.resident(hidden, point, blocks, self.rotary, self.store, NORM_EPS)
        else:
            out = self._layer_by_layer(hidden, point, blocks)
        normed = self._add_and_norm(hidden, out, self.modulation[-1][-1], final_scale, final_shift, point)
        guided, unguided = linear(normed, self.proj_out, self.proj_out_bias).float().chunk(2)
        return guided + (guided - unguided) * GUIDANCE_SCALE

    def _layer_by_layer(self, hidden: torch.Tensor, point: torch.Tensor, blocks: PackedBlocks) -> torch.Tensor:
        """The last layer's output, not yet added; `hidden` is changed in place."""
        out, gate, back = hidden, None, 0  # nothing is added yet
        for layer, (shift, scale, gate_attn, shift_ff, scale_ff, gate_ff) in zip(
            self.layers, self.modulation, strict=True
        ):
            normed = self._add_and_norm(hidden, out, gate, scale, shift, point, self.in_float8)
            attended = self._attend(linear(normed, layer.qkv, layer.qkv_bias), layer, back, point, blocks)
            back += layer.looks_back
            out = linear(attended, layer.out, layer.out_bias)
            normed = self._add_and_norm(hidden, out, gate_attn, scale_ff, shift_ff, point, self.in_float8)
            out, gate = linear(gelu_of_linear(normed, layer.up, layer.up_bias), layer.down, layer.down_bias), gate_ff
        return out

    def _add_and_norm(
        self,
        hidden: torch.Tensor,
        out: torch.Tensor,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        point: torch.Tensor,
        in_float8: bool = False,
    ) -> Rows:
        """Adds the gated output to `hidden` in place; gives the modulated norm of the sum, in the products' dtype.

        Without a gate nothing is added. `gate`, `scale` and `shift` are tables `[times, hidden]`: each block has the
        rows of its own `point`.
        """
        if hidden.is_cuda:
            given = (hidden, out, gate, scale, shift, point, self.block_size, NORM_EPS)
            if in_float8:
                made = Float8Rows.empty_like(hidden)
                dit_kernels.add_and_norm(*given, made.values, made.scales)
                return made
            rounded = torch.empty_like(hidden, dtype=self.dtype)
            dit_kernels.add_and_norm(*given, rounded)
            return rounded
        by_block = hidden.view(2, point.shape[0], self.block_size, -1)
        if gate is not None:
            by_block += gate[point][:, None] * out.view(by_block.shape)
        normed = F.layer_norm(by_block, by_block.shape[-1:], eps=NORM_EPS)
        normed = (normed * (1 + scale[point][:, None]) + shift[point][:, None]).view(hidden.shape)
        return float8.quantized(normed) if in_float8 else normed.to(self.dtype)

    def _attend(
        self, qkv: torch.Tensor, layer: DiTLayer, back: int, point: torch.Tensor, blocks: PackedBlocks
    ) -> torch.Tensor:
        """Attention of every block to itself and the neighbours that the layer looks at: `[2 * N * 24, inner]`.

        `back`: how many layers before this one look back. Blocks to keep are kept after all have been read, at their
        own point.
        """
        store = self.store[:, back] if layer.looks_back else None
        attend = dit_kernels.block_attention if qkv.is_cuda else self.attend_on_host
        attended = attend(qkv, blocks, self.rotary, store, point, layer.looks_ahead, self.block_size, self.num_heads)
        if store is not None:
            keep = dit_kernels.keep_blocks if qkv.is_cuda else keep_on_host
            keep(qkv, blocks.keep, store, point, self.block_size)
        return attended

    @staticmethod
    def attend_on_host(
        qkv: torch.Tensor,
        blocks: PackedBlocks,
        rotary: torch.Tensor,
        store: torch.Tensor | None,
        point: torch.Tensor,
        looks_ahead: bool,
        size: int,
        heads: int,
    ) -> torch.Tensor:
        num_blocks = blocks.length.shape[0]
        packed = qkv.view(2, num_blocks, size, 3, -1)
        query, own = packed[:, :, :, 0], packed[:, :, :, 1:]
        there = torch.arange(size, device=qkv.device) < blocks.length[:, None]  # [N, 24]
        neighbours, masks, places = [own], [there], [1]
        if store is not None:
            kept = store[point, (FIRST_SLOT - blocks.previous).clamp(min=0)].transpose(0, 1)
            in_batch = own[:, blocks.previous.clamp(min=0)]
            neighbours.append(torch.where((blocks.previous >= 0).view(1, -1, 1, 1, 1), in_batch, kept))
            masks.append((blocks.previous != NO_BLOCK)[:, None].expand_as(there))
            places.append(0)
        if looks_ahead:
            neighbours.append(own[:, blocks.following.clamp(min=0)])
            masks.append(there[blocks.following.clamp(min=0)] & (blocks.following != NO_BLOCK)[:, None])
            places.append(2)
        # What is masked may be another request's: a NaN there would stay one, for softmax gives it a weight of zero.
        neighbours = [kv.masked_fill(~m.view(1, *m.shape, 1, 1), 0) for kv, m in zip(neighbours, masks, strict=True)]
        cos, sin = rotary.view(2, 3, size, -1)
        keys = torch.cat(
            [_rotated(kv[:, :, :, 0], cos[i], sin[i], heads) for kv, i in zip(neighbours, places, strict=True)], dim=3
        )
        values = torch.cat([_by_head(kv[:, :, :, 1], heads) for kv in neighbours], dim=3)
        mask = torch.cat(masks, dim=1)[None, :, None, None, :]
        # A block of which no frame is there only fills the batch: let it see itself, for no softmax over nothing.
        mask = mask | (blocks.length == 0).view(1, -1, 1, 1, 1)
        attended = F.scaled_dot_product_attention(_rotated(query, cos[1], sin[1], heads), keys, values, mask)
        return attended.transpose(2, 3).reshape(qkv.shape[0], -1)


def linear(rows: Rows, weight: Rows, bias: torch.Tensor) -> torch.Tensor:
    """A linear layer, in float8 if its weight is."""
    if isinstance(rows, Float8Rows) or isinstance(weight, Float8Rows):
        return float8.product(float8.in_float8(rows), float8.in_float8(weight), bias)
    return F.linear(rows, weight, bias)


def gelu_of_linear(rows: Rows, weight: Rows, bias: torch.Tensor) -> Rows:
    """GELU by tanh of a linear layer; on CUDA in the product's own last step, which saves a pass over memory.

    In float8, if the weight is: there GELU and rounding are one pass.
    """
    if isinstance(rows, Float8Rows) or isinstance(weight, Float8Rows):
        return float8.quantized(linear(rows, weight, bias), gelu=True)
    if rows.is_cuda:
        return torch._addmm_activation(bias, rows, weight.T, use_gelu=True)
    return F.gelu(F.linear(rows, weight, bias), approximate="tanh")


def keep_on_host(qkv: torch.Tensor, keep: torch.Tensor, store: torch.Tensor, point: torch.Tensor, size: int) -> None:
    kept = keep >= 0
    packed = qkv.view(2, keep.shape[0], size, 3, -1)
    store[point[kept], keep[kept].long()] = packed[:, kept, :, 1:].transpose(0, 1)


def _by_head(packed: torch.Tensor, heads: int) -> torch.Tensor:
    """`[2, N, 24, inner]` -> `[2, N, heads, 24, head_dim]`."""
    return packed.unflatten(-1, (heads, -1)).transpose(2, 3)


def _rotated(packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """By head, the first head rotated: the reference's DiT gives positions to no other head."""
    by_head = _by_head(packed, heads)
    first, second = by_head[:, :, :1].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(packed.dtype), by_head[:, :, 1:]], dim=2)


def _deinterleaved(parameter: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The first head's rows in half-split order: the checkpoint has rotary pairs side by side."""
    rows = parameter[:head_dim]
    return torch.cat([rows[0::2], rows[1::2], parameter[head_dim:]])


def _rotary_table(dit: Any, length: int) -> torch.Tensor:
    """Cosines and sines `[2, length, head_dim / 2]`, float32, of positions relative to the left neighbour's start.

    Scores depend on differences of positions only, so three blocks' worth of positions serve every block.
    """
    frequencies = dit.rotary_embed.inv_freq.float()
    angles = torch.arange(length, device=frequencies.device).float()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]) * dit.rotary_embed.attention_scaling


def _modulation(dit: Any, times: torch.Tensor) -> torch.Tensor:
    """Shift, scale and gate of attention, then of the feed-forward: float32 `[layers, times, 6 * hidden]`."""
    embedded = F.silu(dit.time_embed(times))
    return torch.stack([block.attn_norm.linear(embedded).detach() for block in dit.transformer_blocks])


def _final_modulation(dit: Any, times: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scale and shift of the last norm: float32 `[times, hidden]`."""
    rows: torch.Tensor = dit.norm_out.linear(F.silu(dit.time_embed(times)))
    return rows.detach().chunk(2, dim=-1)
