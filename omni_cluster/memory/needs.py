"""What one engine of each stage needs of a card, computed from checkpoint and configuration.

All sizes are bytes on one card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.memory.sizes import GIB, ARSizes, SoundSizes, StageSizes, TowerSizes, gib, weight_bytes
from omni_cluster.types.errors import ConfigError

MIB = 1 << 20

# Orders of magnitude of a vLLM process on a data-centre card. What a card's free memory falls by
# between two starts, less the other parts, corrects them.
CUDA_CONTEXT_BYTES = 1 * GIB
"""Context, loaded kernels, cuBLAS and attention workspaces of one process."""
CUDA_GRAPHS_BYTES = 1 * GIB
"""Captured graphs of a sound stage: their pool and the driver's own records."""
AR_CUDA_GRAPHS_BYTES = 2 * GIB
"""The same of an autoregressive engine, which has a hundred: 1.23 GiB were seen for a talker with some more of them."""
NCCL_BYTES = 1 * GIB
"""Communication buffers of one rank of a tensor-parallel group."""

MARGIN_OF_ACTIVATIONS = 0.2
"""The allocator's rounding and fragments."""
MARGIN_BYTES = 150 * MIB
"""vLLM's own: `redundancy_buffer_memory` in its gpu_worker."""

LOGIT_BYTES = 64
"""Of the sampler, for each logit: bfloat16 and float32 logits (6), sorted values, int64 places and the sort's copies of
both (24), softmax and cumulative sum (8), two int64 counts with their masks for penalties (18), and masks (8): vLLM's
v1/sample/sampler.py, ops/topk_topp_sampler.py and layers/utils.py."""
CODE_BYTES = 2
"""Of a residual code, which is kept for each position that a running request may have."""

# vLLM's defaults for an engine inside another program, the same on every card; not imported, for that takes seconds.
BLOCK_TOKENS = 16
MAX_NUM_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 128

# In float8 all but the layers' weights is bfloat16.
DTYPE_BYTES = {"float32": 4, "tfloat32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8": 2}


@dataclass(frozen=True, slots=True)
class FixedParts:
    """What one engine takes of a card beside its KV cache."""

    weights: int = 0
    activations: int = 0
    streams: int = 0
    cuda_graphs: int = 0
    cuda_context: int = 0
    margin: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """A KV cache's size: `least` it cannot do without, and `wanted`, above which more is of no use."""

    least: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that makes a stage smaller: `value` in steps of `step`, each of which takes `step_bytes`."""

    key: str
    value: int
    step: int
    step_bytes: int

    def fitting(self, excess_bytes: int) -> int:
        """The largest value that takes at least `excess_bytes` less; below 1 when there is none."""
        return (math.ceil(self.value / self.step) - math.ceil(excess_bytes / self.step_bytes)) * self.step


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """One engine of a stage on one card."""

    stage_id: int
    name: str
    fixed: FixedParts
    cache: CacheNeed
    knob: Knob

    @property
    def least(self) -> int:
        return self.fixed.total + self.cache.least


def part_names(parts: FixedParts) -> list[tuple[str, int]]:
    """The parts by the names that a reader sees."""
    names = {"cuda_graphs": "CUDA graphs", "cuda_context": "CUDA context"}
    return [(names.get(field.name, field.name), getattr(parts, field.name)) for field in fields(parts)]


def engine_needs(
    config: PipelineConfig, folder: Path, sizes_of: Callable[[StageConfig], StageSizes], card_bytes: int
) -> list[EngineNeed]:
    """What one engine of each stage with GPUs needs; `sizes_of` a stage, `folder`: of the checkpoint.

    Raises ConfigError for sizes that cannot hold what they must.
    """
    return [
        _engine_need(stage, config, folder, sizes_of(stage), card_bytes)
        for stage in config.stages
        if stage.gpus_per_replica > 0
    ]


def _engine_need(
    stage: StageConfig, config: PipelineConfig, folder: Path, sizes: StageSizes, card_bytes: int
) -> EngineNeed:
    if isinstance(sizes, SoundSizes):
        return _sound_need(stage, config, folder, sizes)
    fixed = ar_parts(stage, folder, sizes)
    knob = Knob("max_model_len", max_model_len(stage, sizes), _block_tokens(stage), _block_bytes(stage, sizes))
    longest = sequence_bytes(stage, sizes)
    stated = _stated_cache(stage, fixed, card_bytes)
    if stated is None:
        given = given_args(stage)
        tokens = min(stage.expected_tokens or knob.value, knob.value)
        wanted = max(longest, max_num_seqs(given) * tokens * cache_bytes_per_token(stage, sizes))
        return EngineNeed(stage.stage_id, stage.model_stage, fixed, CacheNeed(longest, wanted), knob)
    if stated < longest:
        raise ConfigError(_holds_no_sequence(stage, stated, longest, fixed, knob))
    return EngineNeed(stage.stage_id, stage.model_stage, fixed, CacheNeed(stated, stated), knob)


def _stated_cache(stage: StageConfig, fixed: FixedParts, card_bytes: int) -> int | None:
    """The KV cache that the configuration comes to by itself, if it does."""
    size_bytes, share = (stage.engine_args.get(key) for key in ("kv_cache_memory_bytes", "gpu_memory_utilization"))
    if size_bytes is not None:
        return int(size_bytes)
    if stage.memory_gib is not None:
        return math.floor(stage.memory_gib * GIB) - fixed.total
    if share is not None:
        # vLLM's share begins after the context.
        return math.ceil(share * card_bytes) - (fixed.total - fixed.cuda_context)
    return None


def _holds_no_sequence(stage: StageConfig, stated: int, longest: int, fixed: FixedParts, knob: Knob) -> str:
    fitting = knob.fitting(longest - stated)
    smaller = f"set max_model_len to at most {fitting}" if fitting >= 1 else "set fewer max_num_seqs"
    return (
        f"stage {stage.stage_id} ({stage.model_stage}): its configured sizes leave {gib(max(0, stated))} GiB for "
        f"the KV cache beside {gib(fixed.total)} GiB of other parts, and one sequence of max_model_len {knob.value} "
        f"takes {gib(longest)}; give it more memory, or {smaller}."
    )


def _sound_need(stage: StageConfig, config: PipelineConfig, folder: Path, sizes: SoundSizes) -> EngineNeed:
    fixed = sound_parts(config, folder, sizes)
    if stage.memory_gib is not None:
        stated = math.floor(stage.memory_gib * GIB)
        if stated < fixed.total:
            raise ConfigError(
                f"stage {stage.stage_id} ({stage.model_stage}): memory_gib is {stage.memory_gib:g} and its parts take "
                f"{gib(fixed.total)} GiB; give it that much, or set a smaller options.max_streams."
            )
        fixed = replace(fixed, margin=fixed.margin + stated - fixed.total)
    per_stream = sizes.options.states_per_stream * sizes.state_bytes
    knob = Knob("options.max_streams", sizes.options.max_streams, 1, per_stream)
    return EngineNeed(stage.stage_id, stage.model_stage, fixed, CacheNeed(), knob)


# ------------------------------------------------------------------ arithmetic


def ar_parts(stage: StageConfig, folder: Path, sizes: ARSizes) -> FixedParts:
    """What an autoregressive engine takes of each of its cards beside the KV cache."""
    parallel, dtype = stage.tensor_parallel_size, dtype_bytes(stage)
    activations = ar_activation_bytes(stage, sizes)
    return FixedParts(
        weights=weight_bytes(folder, sizes.weights, dtype, parallel, expert_bytes(stage))
        + (sizes.made_elements + sizes.adapter_elements) * dtype,
        activations=activations,
        cuda_graphs=0 if given_args(stage).get("enforce_eager") else AR_CUDA_GRAPHS_BYTES,
        cuda_context=CUDA_CONTEXT_BYTES + (NCCL_BYTES if parallel > 1 else 0),
        margin=_margin(activations),
    )


def sound_parts(config: PipelineConfig, folder: Path, sizes: SoundSizes) -> FixedParts:
    """What a sound stage takes. A loading model is there twice."""
    loading = weight_bytes(folder, sizes.groups, DTYPE_BYTES["float32"], 1)
    activations = max(sizes.activation_bytes(config.limits.max_codec_tokens), loading)
    return FixedParts(
        weights=sum(weight_bytes(folder, stored.groups, stored.element_bytes, 1) for stored in sizes.weights),
        activations=activations,
        streams=sizes.options.stream_slots * sizes.state_bytes,
        cuda_graphs=CUDA_GRAPHS_BYTES if sizes.has_graphs else 0,
        cuda_context=CUDA_CONTEXT_BYTES,
        margin=_margin(activations),
    )


def _margin(activations: int) -> int:
    return math.ceil(MARGIN_OF_ACTIVATIONS * activations) + MARGIN_BYTES


def ar_activation_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    """The largest of three phases that follow each other in a step, and the buffers that outlive them.

    A step is vLLM's `profile_run`: encoders on their budget, the decoder on `max_num_batched_tokens`, the sampler on
    `max_num_seqs`.
    """
    tokens, dtype = max_num_batched_tokens(stage, sizes), dtype_bytes(stage)
    towers = _used_towers(stage, sizes)
    encoder_tokens = max([tokens, *(_item_tokens(tower, stage, sizes) for tower in towers)]) if towers else 0
    encoding = max((_tower_bytes(t, encoder_tokens, dtype, stage.tensor_parallel_size) for t in towers), default=0)
    kept = sum(tower.kept_bytes for tower in towers)
    kept += encoder_tokens * max((tower.output_size for tower in towers), default=0) * dtype
    # Input embeddings, a step's hidden states, and the rows made of them; rows that come in, and the model's buffers.
    kept += tokens * (3 * sizes.hidden_size + sizes.rows_size + sizes.buffers_size) * dtype
    requests = max_num_seqs(given_args(stage))
    kept += requests * max_model_len(stage, sizes) * sizes.residual_codes * CODE_BYTES
    kept += requests * sizes.request_elements * dtype
    sampling = requests * sizes.vocab_size * LOGIT_BYTES
    return kept + max(encoding, tokens * _decoder_bytes(stage, sizes), sampling)


def _decoder_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    """Of one token in a decoder layer: residual, input, norm and output, and the wider of attention and feed-forward.

    Attention has queries, keys and values, queries rotated, and its output; the feed-forward gate, up and product.
    """
    attention = sizes.head_dim * (3 * sizes.num_heads + 2 * sizes.num_kv_heads)
    inner = max(attention, 3 * sizes.intermediate_size) / stage.tensor_parallel_size
    return (4 * sizes.hidden_size + math.ceil(inner)) * dtype_bytes(stage)


def _tower_bytes(tower: TowerSizes, tokens: int, dtype: int, parallel: int) -> int:
    """Of a pass over `tokens`: the input in float32 and in `dtype`, and a layer's tensors at each position.

    Attention has queries, keys and values, the first two made contiguous and rotated, and its output twice: nine widths
    beside residual and norm. The feed-forward is as in a decoder.
    """
    inner = max(9 * tower.hidden_size, 3 * tower.intermediate_size) / (parallel if tower.split else 1)
    position = (2 * tower.hidden_size + math.ceil(inner)) * dtype + tower.input_size * (DTYPE_BYTES["float32"] + dtype)
    return tokens * tower.positions_per_token * position


def _used_towers(stage: StageConfig, sizes: ARSizes) -> list[TowerSizes]:
    return [tower for tower in sizes.towers if any(_limit(stage, name) > 0 for name in tower.modalities)]


def _item_tokens(tower: TowerSizes, stage: StageConfig, sizes: ARSizes) -> int:
    """The largest item: a video, its sound with it, may fill a sequence, and an image is what its processor allows."""
    video = "video" in tower.modalities and _limit(stage, "video") > 0
    return max_model_len(stage, sizes) if video else tower.max_tokens


def _limit(stage: StageConfig, modality: str) -> int:
    limit = (given_args(stage).get("limit_mm_per_prompt") or {}).get(modality, 1)
    return int(limit.get("count", 1) if isinstance(limit, Mapping) else limit)


def sequence_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    """What vLLM wants for one sequence of max_model_len: its whole blocks, and the null block."""
    blocks = math.ceil(max_model_len(stage, sizes) / _block_tokens(stage)) + 1
    return blocks * _block_bytes(stage, sizes)


def cache_bytes_per_token(stage: StageConfig, sizes: ARSizes) -> int:
    """Keys and values of all layers on one card; heads that are fewer than the cards are on each of them."""
    heads = max(1, sizes.num_kv_heads // stage.tensor_parallel_size)
    dtype = str(given_args(stage).get("kv_cache_dtype", "auto"))
    each = 1 if dtype.startswith("fp8") else DTYPE_BYTES.get(dtype, dtype_bytes(stage))
    return 2 * sizes.num_layers * heads * sizes.head_dim * each


def _block_tokens(stage: StageConfig) -> int:
    return int(given_args(stage).get("block_size", BLOCK_TOKENS))


def _block_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    return _block_tokens(stage) * cache_bytes_per_token(stage, sizes)


def dtype_bytes(stage: StageConfig) -> int:
    """Of a weight as the engine loads it; "auto" is 16 bits, which vLLM makes of a float32 checkpoint too."""
    given = str(given_args(stage).get("dtype", "auto")).removeprefix("torch.")
    return DTYPE_BYTES["bfloat16"] if given == "auto" else DTYPE_BYTES.get(given, DTYPE_BYTES["float32"])


def expert_bytes(stage: StageConfig) -> int:
    """Of a weight of the experts, which vLLM may make float8 as it loads them. Others are counted unquantized."""
    given = given_args(stage)
    of_experts = (given.get("quantization_config") or {}).get("moe") or given.get("quantization")
    return 1 if str(of_experts).startswith("fp8") else dtype_bytes(stage)


def max_model_len(stage: StageConfig, sizes: ARSizes) -> int:
    given = given_args(stage).get("max_model_len")
    return given if isinstance(given, int) and given > 0 else sizes.max_positions


def max_num_seqs(engine_args: Mapping[str, Any]) -> int:
    return int(engine_args.get("max_num_seqs", MAX_NUM_SEQS))


def max_num_batched_tokens(stage: StageConfig, sizes: ARSizes) -> int:
    given = given_args(stage)
    default = min(MAX_NUM_BATCHED_TOKENS, max_num_seqs(given) * max_model_len(stage, sizes))
    return int(given.get("max_num_batched_tokens", default))


def given_args(stage: StageConfig) -> dict[str, Any]:
    """The engine arguments that say something."""
    return {key: value for key, value in stage.engine_args.items() if value is not None}
