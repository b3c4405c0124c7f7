"""The memory of every engine, computed from checkpoint and configuration, and checked before an engine starts.

What vLLM 0.30 does with it: with `kv_cache_memory_bytes` the cache has that size and nothing is measured; only
`gpu_memory_utilization` of the card must be free when the engine starts (`request_memory`), which is therefore set to
what the engine still has to take at that point.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omni_cluster.config.schema import PRESET_PREFIX, DiffusionConfig, PipelineConfig, StageConfig
from omni_cluster.engine.build import BoundPipeline, bind
from omni_cluster.engine.cards import VARIABLE, visible_cards
from omni_cluster.errors import ConfigError
from omni_cluster.memory.plan import (
    GIB,
    CacheNeed,
    EngineMemory,
    EngineNeed,
    FixedParts,
    Knob,
    MemoryPlan,
    cards_of_one_process,
    cards_of_replicas,
    gib,
    plan_memory,
)
from omni_cluster.memory.sizes import ARSizes, DiffusionSizes, StageSizes, TowerSizes, weight_bytes
from omni_cluster.vllm_engine.card_memory import CardMemory, measure_cards

MIB = 1 << 20

# Not measured yet: orders of magnitude of a vLLM process on a data-centre card. What a card's free memory falls by
# between two starts, less the other parts, corrects them.
CUDA_CONTEXT_BYTES = 1 * GIB
"""Context, loaded kernels, cuBLAS and attention workspaces of one process."""
CUDA_GRAPHS_BYTES = 1 * GIB
"""Captured graphs of one engine: their pool and the driver's own records."""
NCCL_BYTES = 1 * GIB
"""Communication buffers of one rank of a tensor-parallel group."""
CARD_RESERVE_BYTES = 1 * GIB
"""What nobody gets of a card: the driver's part, which counts as taken on an idle card too."""

MARGIN_OF_ACTIVATIONS = 0.2
"""The allocator's rounding and fragments."""
MARGIN_BYTES = 150 * MIB
"""vLLM's own: `redundancy_buffer_memory` in its gpu_worker."""

LOGIT_BYTES = 64
"""Of the sampler, for each logit: bfloat16 and float32 logits (6), sorted values, int64 places and the sort's copies of
both (24), softmax and cumulative sum (8), two int64 counts with their masks for penalties (18), and masks (8): vLLM's
v1/sample/sampler.py, ops/topk_topp_sampler.py and layers/utils.py."""

# vLLM's defaults for an engine inside another program, the same on every card; not imported, for that takes seconds.
BLOCK_TOKENS = 16
MAX_NUM_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 128

DTYPE_BYTES = {"float32": 4, "tfloat32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def fit_process(bound: BoundPipeline) -> BoundPipeline:
    """`bound` with the memory of each engine set, for a process that runs one engine of each stage.

    Raises ConfigError for what does not fit, before anything starts; nothing is set where there are no cards.
    """
    measured = _measure_own_cards(bound.config.stages)
    return fit_cards(bound, measured) if measured else bound


def fit_cards(bound: BoundPipeline, measured: Mapping[int, CardMemory]) -> BoundPipeline:
    """As `fit_process`, with the cards given by number."""
    size = _smallest(measured.values())
    cards = cards_of_one_process(bound.config.stages, size - CARD_RESERVE_BYTES, _first_visible())
    plan = plan_memory(engine_needs(bound, size), tuple(cards.values()))
    for number, card in cards.items():
        _refuse_too_little_free(card.name, plan.taken(card), measured[number])
    return _with_memory(bound, plan, size)


def fit_replica(bound: BoundPipeline, stage_id: int) -> BoundPipeline:
    """`bound` with the memory of each engine set, for a replica of one stage that sees its own cards only.

    All replicas compute the same plan, from the size of a card. Raises ConfigError for what does not fit, before this
    replica's engine starts; nothing is set where there are no cards.
    """
    stage = next(s for s in bound.config.stages if s.stage_id == stage_id)
    measured = measure_cards()[: stage.tensor_parallel_size] if stage.gpus_per_replica else ()
    if not measured:
        return bound
    return fit_cards_of_replica(bound, stage, measured)


def fit_cards_of_replica(bound: BoundPipeline, stage: StageConfig, measured: Sequence[CardMemory]) -> BoundPipeline:
    """As `fit_replica`, with the replica's cards given."""
    plan = memory_plan(bound, _smallest(measured))
    for number, card in enumerate(measured):
        _refuse_too_little_free(f"GPU {number} of {stage.model_stage}", plan.engines[stage.stage_id].total, card)
    return _with_memory(bound, plan, _smallest(measured))


def memory_plan(bound: BoundPipeline, card_bytes: int) -> MemoryPlan:
    """The memory of all replicas in a cluster of cards of `card_bytes`. Raises ConfigError for what does not fit."""
    return plan_memory(
        engine_needs(bound, card_bytes), cards_of_replicas(bound.config.stages, card_bytes - CARD_RESERVE_BYTES)
    )


def bind_downloaded(config: PipelineConfig) -> BoundPipeline:
    """As `bind`, but downloads nothing: ConfigError for a hub's checkpoint that is not here."""
    model = config.model
    if not model.startswith(PRESET_PREFIX) and not Path(model).expanduser().exists():
        model = _downloaded(model)
    return bind(config.model_copy(update={"model": model}))


def _downloaded(name: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model is {name!r}, which is not on this host, so its weights cannot be counted; download it first, or "
            f"name a checkpoint's folder."
        ) from error


def _smallest(cards: Iterable[CardMemory]) -> int:
    return min(card.total_bytes for card in cards)


def _measure_own_cards(stages: Sequence[StageConfig]) -> dict[int, CardMemory]:
    """The cards that the stages run on in this process, by number."""
    numbers = sorted(cards_of_one_process(stages, 0, _first_visible()))
    pinned = numbers if any(stage.gpus for stage in stages) else None
    with visible_cards(pinned):
        measured = measure_cards() if numbers else ()
    if measured and len(measured) < len(numbers):
        raise ConfigError(f"the stages need GPUs {numbers} and {len(measured)} of them are here; use fewer cards.")
    return dict(zip(numbers, measured, strict=False))


def _first_visible() -> int:
    first = os.environ.get(VARIABLE, "").split(",")[0]
    return int(first) if first.isdecimal() else 0


def _refuse_too_little_free(name: str, needed: int, card: CardMemory) -> None:
    if needed > card.free_bytes:
        raise ConfigError(
            f"{name} has {gib(card.free_bytes)} of {gib(card.total_bytes)} GiB free and {gib(needed)} are needed; "
            f"end what else runs there, or use another card."
        )


def _with_memory(bound: BoundPipeline, plan: MemoryPlan, card_bytes: int) -> BoundPipeline:
    stages = [
        _stage_with_memory(stage, plan.engines[stage.stage_id], card_bytes) if stage.stage_id in plan.engines else stage
        for stage in bound.config.stages
    ]
    return replace(bound, config=bound.config.model_copy(update={"stages": stages}))


def _stage_with_memory(stage: StageConfig, engine: EngineMemory, card_bytes: int) -> StageConfig:
    """The configuration's own sizes win."""
    if stage.engine_args.get("gpu_memory_utilization") is not None:
        return stage
    # The context is there before vLLM looks at what is free.
    to_take = engine.total - engine.fixed.cuda_context - engine.fixed.margin
    computed = {"gpu_memory_utilization": to_take / card_bytes}
    if engine.kv_cache:
        computed["kv_cache_memory_bytes"] = engine.kv_cache
    return stage.model_copy(update={"engine_args": {**computed, **_given(stage)}})


# ------------------------------------------------------------ what stages need


def engine_needs(bound: BoundPipeline, card_bytes: int) -> list[EngineNeed]:
    """What one engine of each stage with GPUs needs. Raises ConfigError for sizes that cannot hold what they must."""
    needs = []
    for stage in bound.config.stages:
        if stage.gpus_per_replica > 0:
            sizes = bound.family.memory(stage.model_stage)
            needs.append(_engine_need(stage, bound.config, bound.folder, sizes, card_bytes))
    return needs


def _engine_need(
    stage: StageConfig, config: PipelineConfig, folder: Path, sizes: StageSizes, card_bytes: int
) -> EngineNeed:
    if isinstance(sizes, DiffusionSizes):
        return _diffusion_need(stage, config, folder, sizes)
    fixed = ar_parts(stage, folder, sizes)
    knob = Knob("max_model_len", max_model_len(stage, sizes), _block_tokens(stage), _block_bytes(stage, sizes))
    longest = sequence_bytes(stage, sizes)
    stated = _stated_cache(stage, fixed, card_bytes)
    if stated is None:
        given = _given(stage)
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


def _diffusion_need(stage: StageConfig, config: PipelineConfig, folder: Path, sizes: DiffusionSizes) -> EngineNeed:
    settings = stage.diffusion or DiffusionConfig()
    fixed = diffusion_parts(settings, config, folder, sizes)
    if stage.memory_gib is not None:
        stated = math.floor(stage.memory_gib * GIB)
        if stated < fixed.total:
            raise ConfigError(
                f"stage {stage.stage_id} ({stage.model_stage}): memory_gib is {stage.memory_gib:g} and its parts take "
                f"{gib(fixed.total)} GiB; give it that much, or set a smaller diffusion.max_streams."
            )
        fixed = replace(fixed, margin=fixed.margin + stated - fixed.total)
    stream_bytes = sizes.stream_elements * DTYPE_BYTES[settings.dtype]
    knob = Knob("diffusion.max_streams", settings.max_streams, 1, stream_bytes)
    return EngineNeed(stage.stage_id, stage.model_stage, fixed, CacheNeed(), knob)


# ------------------------------------------------------------------ arithmetic


def ar_parts(stage: StageConfig, folder: Path, sizes: ARSizes) -> FixedParts:
    """What an autoregressive engine takes of each of its cards beside the KV cache."""
    parallel = stage.tensor_parallel_size
    activations = ar_activation_bytes(stage, sizes)
    return FixedParts(
        weights=weight_bytes(folder, sizes.weights, dtype_bytes(stage), parallel),
        activations=activations,
        cuda_graphs=0 if _given(stage).get("enforce_eager") else CUDA_GRAPHS_BYTES,
        cuda_context=CUDA_CONTEXT_BYTES + (NCCL_BYTES if parallel > 1 else 0),
        margin=_margin(activations),
    )


def diffusion_parts(
    settings: DiffusionConfig, config: PipelineConfig, folder: Path, sizes: DiffusionSizes
) -> FixedParts:
    """What a diffusion engine takes. A job larger than a batch's bound runs alone; a loading model is there twice."""
    dtype, vocoder_dtype = DTYPE_BYTES[settings.dtype], DTYPE_BYTES[settings.vocoder_dtype]
    frames = max(settings.max_batch_frames, config.limits.max_codec_tokens * sizes.frames_per_code)
    loading = weight_bytes(folder, (*sizes.weights, *sizes.vocoder_weights), DTYPE_BYTES["float32"], 1)
    activations = max(frames * sizes.frame_bytes, loading)
    return FixedParts(
        weights=weight_bytes(folder, sizes.weights, dtype, 1)
        + weight_bytes(folder, sizes.vocoder_weights, vocoder_dtype, 1),
        activations=activations,
        streams=settings.stream_slots * sizes.stream_elements * dtype,
        cuda_graphs=CUDA_GRAPHS_BYTES if settings.cuda_graphs else 0,
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
    kept = encoder_tokens * max((tower.output_size for tower in towers), default=0) * dtype
    # Input embeddings, a step's hidden states, and the rows made of them; and the rows that come in.
    kept += tokens * (3 * sizes.hidden_size + sizes.rows_size) * dtype
    sampling = max_num_seqs(_given(stage)) * sizes.vocab_size * LOGIT_BYTES
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
    limit = (_given(stage).get("limit_mm_per_prompt") or {}).get(modality, 1)
    return int(limit.get("count", 1) if isinstance(limit, Mapping) else limit)


def sequence_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    """What vLLM wants for one sequence of max_model_len: its whole blocks, and the null block."""
    blocks = math.ceil(max_model_len(stage, sizes) / _block_tokens(stage)) + 1
    return blocks * _block_bytes(stage, sizes)


def cache_bytes_per_token(stage: StageConfig, sizes: ARSizes) -> int:
    """Keys and values of all layers on one card; heads that are fewer than the cards are on each of them."""
    heads = max(1, sizes.num_kv_heads // stage.tensor_parallel_size)
    dtype = str(_given(stage).get("kv_cache_dtype", "auto"))
    each = 1 if dtype.startswith("fp8") else DTYPE_BYTES.get(dtype, dtype_bytes(stage))
    return 2 * sizes.num_layers * heads * sizes.head_dim * each


def _block_tokens(stage: StageConfig) -> int:
    return int(_given(stage).get("block_size", BLOCK_TOKENS))


def _block_bytes(stage: StageConfig, sizes: ARSizes) -> int:
    return _block_tokens(stage) * cache_bytes_per_token(stage, sizes)


def dtype_bytes(stage: StageConfig) -> int:
    """Of a weight as the engine loads it; "auto" is 16 bits, which vLLM makes of a float32 checkpoint too."""
    given = str(_given(stage).get("dtype", "auto")).removeprefix("torch.")
    return DTYPE_BYTES["bfloat16"] if given == "auto" else DTYPE_BYTES.get(given, DTYPE_BYTES["float32"])


def max_model_len(stage: StageConfig, sizes: ARSizes) -> int:
    given = _given(stage).get("max_model_len")
    return given if isinstance(given, int) and given > 0 else sizes.max_positions


def max_num_seqs(engine_args: Mapping[str, Any]) -> int:
    return int(engine_args.get("max_num_seqs", MAX_NUM_SEQS))


def max_num_batched_tokens(stage: StageConfig, sizes: ARSizes) -> int:
    given = _given(stage)
    default = min(MAX_NUM_BATCHED_TOKENS, max_num_seqs(given) * max_model_len(stage, sizes))
    return int(given.get("max_num_batched_tokens", default))


def _given(stage: StageConfig) -> dict[str, Any]:
    """The engine arguments that say something."""
    return {key: value for key, value in stage.engine_args.items() if value is not None}
