"""The decoder's kernels against plain PyTorch of the same formula, and the whole decoder under a CUDA graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from omni_cluster.kernels import decoder_kernels
from omni_cluster.kernels.decoder_kernels import NUM_COUNTERS
from omni_cluster.kernels.decoder_tiles import (
    GATE_UP_TILES,
    LINEAR_ADD_TILES,
    QKV_TILES,
    Tiles,
    TilesByDtype,
    tiles_of_nearest,
)
from omni_cluster.kernels.fused_decoder import FusedDecoder, _is_read, weight_of
from tests.kernels.kernel_cases import EPS, SCALES, product, rms_norm, silu_and_multiply, stored

ROOT = Path(__file__).parents[3]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 128, 16
SECTIONS = (16, 24, 24)
LENGTHS = [1, 15, 16, 17, 700, 5000, 33, 128, 129]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated meanwhile holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def zero_counters() -> torch.Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")


def assert_close(made: torch.Tensor, wanted: torch.Tensor, close: float = 5e-3) -> None:
    error = (made.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < close, f"relative error {error}"


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`heads` `[n, heads, head_dim]`, `cos`, `sin` `[n, head_dim // 2]`."""
    a, b = heads.float().chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(heads.dtype)


def chosen_angles(positions: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As vLLM's `MRotaryEmbedding.forward_native` chooses them."""
    return tuple(
        torch.cat([m[i] for i, m in enumerate(half.split(SECTIONS, dim=-1))], dim=-1)
        for half in cache[positions].chunk(2, dim=-1)
    )


def make_cos_sin_cache(length: int) -> torch.Tensor:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).bfloat16().cuda()


class Pages:
    """A paged cache of `kv_heads` heads that holds NaN wherever a step must not read."""

    def __init__(self, lengths: list[int], tokens_outside: bool, num_padded: int = 0, widest: int = 0) -> None:
        self.lengths = lengths
        widest = widest or max(-(-length // PAGE) for length in lengths)
        num_blocks = 1 + len(lengths) * widest
        shape = (num_blocks, PAGE, KV_HEADS) if tokens_outside else (num_blocks, KV_HEADS, PAGE)
        self.cache = torch.full((*shape, 2 * HEAD_DIM), float("nan"), device="cuda", dtype=torch.bfloat16)
        if tokens_outside:
            self.cache = self.cache.transpose(1, 2)
        table = 1 + torch.randperm(num_blocks - 1).reshape(len(lengths), widest).int()
        slots = [
            int(table[row, (length - 1) // PAGE]) * PAGE + (length - 1) % PAGE for row, length in enumerate(lengths)
        ]
        self.block_table = torch.cat([table, torch.zeros(num_padded, widest, dtype=torch.int32)]).cuda()
        self.seq_lens = torch.tensor(lengths + [0] * num_padded, dtype=torch.int32, device="cuda")
        self.slot_mapping = torch.tensor(slots + [-1] * num_padded, device="cuda")
        for row, length in enumerate(lengths):
            block, place = self.places(row, length - 1)
            self.cache[block, :, place] = draw(length - 1, KV_HEADS, 2 * HEAD_DIM)

    def places(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        position = torch.arange(length, device="cuda")
        return self.block_table[row].long()[position // PAGE], position % PAGE


def attention(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pages: Pages, cache: torch.Tensor
) -> torch.Tensor:
    """Plain attention of the requests; stores their new keys and values in `cache`."""
    heads = qkv.unflatten(1, (-1, HEAD_DIM))
    q, k = rotate(heads[:, :HEADS], cos, sin), rotate(heads[:, HEADS:-KV_HEADS], cos, sin)
    out = []
    for row, length in enumerate(pages.lengths):
        block, place = pages.places(row, length)
        cache[block[-1], :, place[-1]] = torch.cat([k[row], heads[row, -KV_HEADS:]], dim=-1)
        keys, values = cache[block, :, place].float().chunk(2, dim=-1)
        grouped = q[row].float().unflatten(0, (KV_HEADS, -1))
        scores = torch.einsum("kgd,tkd->kgt", grouped, keys) * HEAD_DIM**-0.5
        out.append(torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values).flatten())
    return torch.stack(out).to(qkv.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 16, 23, 33, 64])
@pytest.mark.parametrize("width", [896, 3584])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_norm_and_linear_are_the_plain_ones(n: int, width: int, overlap: bool, scales: int) -> None:
    x, gain, bias = draw(n, width), draw(width), draw(width + 100)
    weight = stored(draw(width + 100, width, scale=0.05), scales)
    with poisoned():
        made = decoder_kernels.norm_linear(x, gain, EPS, weight, bias, overlap=overlap)
    assert_close(made, product(rms_norm(x, gain), weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 16, 23, 33, 64])
@pytest.mark.parametrize(("features", "width"), [(1000, 896), (18900, 3584)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_norm_and_gated_linear_are_the_plain_ones(
    n: int, features: int, width: int, overlap: bool, scales: int
) -> None:
    x, gain, weight = draw(n, width), draw(width), stored(draw(2 * features, width, scale=0.05), scales)
    with poisoned():
        made = decoder_kernels.norm_gate_up(x, gain, EPS, weight, overlap=overlap)
    assert_close(made, silu_and_multiply(product(rms_norm(x, gain), weight)))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 2, 16, 23, 33, 64])
@pytest.mark.parametrize(("features", "width"), [(900, 1536), (900, 18944), (900, 5000), (3500, 3584), (3584, 18944)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scales", SCALES)
def test_linear_and_add_are_the_plain_ones_on_every_run(
    n: int, features: int, width: int, overlap: bool, scales: int
) -> None:
    x, residual = draw(n, width), draw(n, features)
    weight = stored(draw(features, width, scale=width**-0.5), scales)
    counters = zero_counters()
    with poisoned():
        made = decoder_kernels.linear_add(x, weight, residual, counters, overlap=overlap)
        again = [decoder_kernels.linear_add(x, weight, residual, counters, overlap=overlap) for _ in range(5)]
    assert_close(made, product(x, weight) + residual)
    assert all(torch.equal(other, made) for other in again)
    assert not counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("scales", SCALES)
def test_products_are_the_same_to_the_bit_beside_what_fills_the_card(n: int, scales: int) -> None:
    x, gain, residual = draw(n, 3584), draw(3584), draw(n, 3584)
    gate_up = stored(draw(2 * 18944, 3584, scale=0.02), scales)
    down = stored(draw(3584, 18944, scale=0.01), scales)
    counters, beside, other = zero_counters(), torch.cuda.Stream(), draw(4096, 4096, scale=0.02)
    made = []
    for _ in range(50):
        with torch.cuda.stream(beside):
            other @ other
        gated = decoder_kernels.norm_gate_up(x, gain, EPS, gate_up, overlap=False)
        made.append((gated, decoder_kernels.linear_add(gated, down, residual, counters, overlap=False)))
    assert_close(made[0][0], silu_and_multiply(product(rms_norm(x, gain), gate_up)))
    assert_close(made[0][1], product(made[0][0], down) + residual)
    assert all(torch.equal(a, made[0][0]) and torch.equal(b, made[0][1]) for a, b in made)


@pytest.mark.gpu
def test_what_is_asked_for_ahead_in_float8_changes_nothing() -> None:
    x, weight, residual = draw(16, 896), stored(draw(900, 896, scale=0.03), 1), draw(16, 900)
    tiles = Tiles(32, 128, 2, 4, 3, ahead=448)
    made = decoder_kernels.linear_add(x, weight, residual, zero_counters(), overlap=True, tiles=tiles)
    assert_close(made, product(x, weight) + residual)


@pytest.mark.gpu
def test_angles_are_those_of_each_section() -> None:
    buffer = torch.randint(0, 3000, (3, 100), device="cuda")
    positions, cache = buffer[:, :7], make_cos_sin_cache(3000)
    with poisoned():
        made = decoder_kernels.rotary_of_step(positions, cache, SECTIONS, torch.bfloat16, overlap=True)
    for angles, wanted in zip(made, chosen_angles(positions, cache), strict=True):
        assert torch.equal(angles, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_outside", [False, True])
@pytest.mark.parametrize("heads", [3 * KV_HEADS, 7 * KV_HEADS])
@pytest.mark.parametrize("lengths", [*([length] for length in LENGTHS), [32768], LENGTHS, LENGTHS * 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_attention_is_the_plain_one(
    lengths: list[int], heads: int, tokens_outside: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEADS", heads)
    num_padded = 0 if len(lengths) == 1 else 3
    pages, n = Pages(lengths, tokens_outside, num_padded), len(lengths)
    qkv = draw(n + num_padded, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    cos, sin = make_cos_sin_cache(32768)[pages.seq_lens.long().clamp(min=1) - 1].chunk(2, dim=-1)
    cos, sin = cos.contiguous(), sin.contiguous()
    kept, counters = pages.cache.clone(), zero_counters()
    wanted = attention(qkv[:n], cos[:n], sin[:n], pages, kept)
    paged = pages.cache, pages.block_table, pages.seq_lens, pages.slot_mapping
    with poisoned():
        made = decoder_kernels.attend(qkv, cos, sin, *paged, HEAD_DIM**-0.5, counters, overlap=overlap)
    assert_close(made[:n], wanted)
    assert made.isfinite().all()
    # The new keys' sums of two products may round the other way.
    torch.testing.assert_close(pages.cache, kept, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert not counters.any()


def make_layer(number: int, width: int, inner: int, scales: int) -> Any:
    size = HEADS * HEAD_DIM

    def weights(features: int, columns: int, bias: bool = False) -> Any:
        weight = stored(draw(features, columns, scale=columns**-0.5), scales)
        kept = weight.values if weight.scales is None else weight.values.t()
        return SimpleNamespace(weight=kept, weight_scale=weight.scales, bias=draw(features) if bias else None)

    return SimpleNamespace(
        input_layernorm=SimpleNamespace(weight=draw(width), variance_epsilon=EPS),
        post_attention_layernorm=SimpleNamespace(weight=draw(width), variance_epsilon=EPS),
        self_attn=SimpleNamespace(
            qkv_proj=weights(size + 2 * KV_HEADS * HEAD_DIM, width, bias=True),
            o_proj=weights(width, size),
            attn=SimpleNamespace(layer_name=f"layers.{number}", kv_cache=None),
            rotary_emb=SimpleNamespace(cos_sin_cache=make_cos_sin_cache(6000), mrope_section=list(SECTIONS)),
            scaling=HEAD_DIM**-0.5,
        ),
        mlp=SimpleNamespace(gate_up_proj=weights(2 * inner, width), down_proj=weights(width, inner)),
    )


def plain_decode(
    layers: list[Any], positions: torch.Tensor, hidden: torch.Tensor, pages: Pages, caches: list[torch.Tensor]
) -> torch.Tensor:
    cos, sin = chosen_angles(positions, layers[0].self_attn.rotary_emb.cos_sin_cache)
    for layer, cache in zip(layers, caches, strict=True):
        projection, mlp = layer.self_attn.qkv_proj, layer.mlp
        qkv = product(rms_norm(hidden, layer.input_layernorm.weight), weight_of(projection), projection.bias)
        attended = attention(qkv, cos, sin, pages, cache)
        hidden = hidden + product(attended, weight_of(layer.self_attn.o_proj))
        both = product(rms_norm(hidden, layer.post_attention_layernorm.weight), weight_of(mlp.gate_up_proj))
        hidden = hidden + product(silu_and_multiply(both), weight_of(mlp.down_proj))
    return rms_norm(hidden, torch.ones_like(hidden[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3, 18])
@pytest.mark.parametrize("scales", SCALES)
def test_replayed_graph_is_the_plain_decoder(n: int, scales: int) -> None:
    """Each replay has other lengths, places, positions and inputs, behind the addresses of the first."""
    layers = [make_layer(number, 384, 5000, scales) for number in range(3)]
    decoder = FusedDecoder(layers, lambda x: rms_norm(x, torch.ones_like(x[0])))
    num_padded = 2 if n > 1 else 0
    longest = [LENGTHS[(row + 4) % len(LENGTHS)] for row in range(n)]
    static = Pages(longest, False, num_padded)
    hidden, positions = draw(n + num_padded, 384), torch.zeros(3, n + num_padded, dtype=torch.int64, device="cuda")
    for layer in layers:
        layer.self_attn.attn.kv_cache = torch.zeros_like(static.cache)
    metadata = SimpleNamespace(block_table=static.block_table, seq_lens=static.seq_lens)
    names = [layer.self_attn.attn.layer_name for layer in layers]
    context = dict.fromkeys(names, metadata), dict.fromkeys(names, static.slot_mapping)
    decoder.decode(positions, hidden, *context)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = decoder.decode(positions, hidden, *context)
    for fewer in range(4):
        pages = Pages(
            [max(1, length - 5 * fewer) for length in longest], False, num_padded, static.block_table.shape[1]
        )
        for name in ("block_table", "seq_lens", "slot_mapping"):
            getattr(static, name).copy_(getattr(pages, name))
        hidden.copy_(draw(n + num_padded, 384))
        positions.copy_(torch.randint(0, 6000, positions.shape))
        for layer in layers:
            layer.self_attn.attn.kv_cache.normal_()
        caches = [layer.self_attn.attn.kv_cache.clone() for layer in layers]
        graph.replay()
        wanted = plain_decode(layers, positions[:, :n], hidden[:n], pages, caches)
        assert_close(made[:n], wanted, 2e-2)
        assert made.isfinite().all()
        for layer, cache in zip(layers, caches, strict=True):
            assert_close(layer.self_attn.attn.kv_cache, cache, 2e-2)


def test_products_as_triton_interprets_them() -> None:
    command = [sys.executable, "-m", "tests.kernels.interpreted_decoder"]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    assert len(made) == 18 and all(float(difference) < 1e-6 for difference in made)


def projection(weight: torch.Tensor, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(weight=weight, output_size=32, input_size=48, **more)


def test_which_weights_of_a_projection_are_read() -> None:
    plain, values = torch.zeros(32, 48, dtype=torch.bfloat16), torch.zeros(32, 48).to(torch.float8_e4m3fn)
    one, each = torch.ones(1), torch.ones(32, 1)
    read = [
        projection(plain),
        projection(values.t(), weight_scale=one),
        projection(values.t(), weight_scale=each),
        projection(values.t(), weight_scale=one.squeeze()),
    ]
    left = [
        projection(plain.float()),
        projection(plain.t()),
        projection(values, weight_scale=one),  # [features, width] is not how vLLM keeps it
        projection(torch.zeros(48, 32).to(torch.float8_e4m3fn), weight_scale=one),
        projection(values.t(), weight_scale_inv=torch.ones(1, 1)),  # a scale a block
        projection(values.t(), weight_scale=torch.ones(16)),
        projection(torch.zeros(48, 48).to(torch.float8_e4m3fn).t(), weight_scale=one),  # padded
        projection(torch.zeros(32, 24, dtype=torch.int8)),
        SimpleNamespace(qweight=torch.zeros(32, 6, dtype=torch.int32)),  # AWQ
    ]
    assert [_is_read(each, torch.bfloat16) for each in read] == [True] * len(read)
    assert [_is_read(each, torch.bfloat16) for each in left] == [False] * len(left)


def test_only_bfloat16_on_a_cuda_card_fits() -> None:
    layer = SimpleNamespace(input_layernorm=SimpleNamespace(weight=torch.zeros(1)))
    assert not FusedDecoder([layer], torch.nn.Identity()).fits(torch.zeros(1, 896, dtype=torch.bfloat16))


def test_a_weight_that_was_not_measured_is_cut_as_the_one_nearest_in_size() -> None:
    asked = (896, 1536), (2048, 4096), (2048, 11008), (5120, 27648)
    shapes = (896, 1536), (3584, 3584), (896, 18944), (3584, 18944)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        weights = (torch.empty(shape, dtype=dtype, device="meta") for shape in asked)
        nearest = [tiles_of_nearest(LINEAR_ADD_TILES, weight) for weight in weights]
        assert [LINEAR_ADD_TILES[dtype][shape] for shape in shapes] == nearest


@pytest.mark.parametrize(
    ("kernel", "tables"),
    [("_linear", GATE_UP_TILES), ("_linear", QKV_TILES), ("_linear_add", LINEAR_ADD_TILES)],
    ids=["gate_up", "qkv", "linear_add"],
)
def test_no_product_in_float8_takes_registers_to_a_warp_group(kernel: str, tables: TilesByDtype) -> None:
    """See `decoder_tiles`. Each is compiled for Hopper, as its weight in bfloat16 is, which does use warp groups."""
    compiled = {dtype: [hopper_code(kernel, shape, rows, tiles, dtype, tables is GATE_UP_TILES)
                        for shape, by_rows in tables[dtype].items() for rows, tiles in by_rows.items() if rows > 1]
                for dtype in tables}  # fmt: skip
    assert compiled[torch.float8_e4m3fn] and not any("wgmma" in code for code in compiled[torch.float8_e4m3fn])
    if tables is GATE_UP_TILES:
        assert any("wgmma" in code for code in compiled[torch.bfloat16])


def hopper_code(
    kernel: str, shape: tuple[int, int], rows: int, tiles: Tiles, dtype: torch.dtype, is_gated: bool
) -> str:
    """PTX of a product of several rows."""
    function, is_float8 = getattr(decoder_kernels, kernel), dtype == torch.float8_e4m3fn
    span = -(-shape[1] // tiles.splits // tiles.columns) * tiles.columns
    constants: dict[str, Any] = {
        "WIDTH": shape[1], "SCALE_STEP": 0 if is_float8 else None, "GATED": is_gated, "ROWS": rows, "SPAN": span,
        "SPLITS": tiles.splits, "FEATURES": tiles.features, "COLUMNS": tiles.columns, "STAGES": tiles.stages,
        "AHEAD": 0, "PIECES": 1, "OVERLAP": False,
    }  # fmt: skip
    constants |= {"bias": None} if is_gated else {}
    constants |= {} if is_float8 else {"scales": None}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = dict.fromkeys(function.arg_names, "*bf16")
    types |= {"parts": "*fp32", "scales": "*fp32", "counters": "*i32", "num_rows": "i32", "num_features": "i32"}
    types |= {"weight": "*fp8e4nv"} if is_float8 else {}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    indexed = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature=signature, constexprs=indexed, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": tiles.warps}).asm["ptx"])


def test_rows_of_a_product_are_padded() -> None:
    assert [decoder_kernels.padded_rows(n) for n in (1, 2, 16, 17, 40, 64)] == [1, 16, 16, 32, 64, 64]
