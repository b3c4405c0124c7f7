"""From one stage's configuration to vLLM's engine arguments, and the part of it that the workers read back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationMode, StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.config.sharing import all_share_a_card
from omni_cluster.config.traits import EngineTraits
from omni_cluster.memory.sizes import GIB
from omni_cluster.models.lora import LoraAdapter
from omni_cluster.models.stage_spec import ARSpec, RowsAt
from omni_cluster.types.errors import ConfigError
from omni_cluster.vllm_engine.grammar import SETTINGS
from omni_cluster.vllm_engine.install import log_buffers_kept
from omni_cluster.vllm_engine.lora import lora_args
from omni_cluster.vllm_engine.worker.prefill_graphs import CAPTURE_SIZES, HOST_BOUND_SIZES, MAX_SPLITS

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.v1.executor.abstract import Executor

ADDITIONAL_KEY = "omni"
FLASHINFER = "FLASHINFER"
"""vLLM's name of it, an attention backend."""
AR_WORKER = "omni_cluster.vllm_engine.worker.ar_worker.GPUARWorker"
SOUND_WORKER = "omni_cluster.vllm_engine.worker.sound_worker.GPUSoundWorker"
SCHEDULER = "omni_cluster.vllm_engine.scheduler.OmniScheduler"
ASYNC_SCHEDULER = "omni_cluster.vllm_engine.scheduler.OmniAsyncScheduler"
IN_PROCESS_EXECUTOR = "omni_cluster.vllm_engine.executor.InProcessExecutor"
# There is no KV cache: a stated size keeps vLLM from measuring and reserving memory for one, and the share of a card is
# only what must be free at the start.
_SOUND_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 20,
    "gpu_memory_utilization": 0.1,
}


@dataclass(frozen=True, slots=True)
class OmniModelConfig:
    """What a stage's workers and scheduler know of the pipeline; travels in vLLM's `additional_config`.

    `rows_kind`: of the rows that requests may ask for; "": none. `takes_rows`: the model has a static `extra_rows`
    buffer. `rows_at`, `has_rows_out`, `takes_ids`, `has_residual_codes`, `penalises_prompts`: see `ARSpec`.
    `max_payload_elements`: no rows that come at once may have more elements. `max_decode_steps`: tokens that a request
    may get in one step of the engine.
    `kept_rows_bytes`: of rows that are emitted, as many are kept for cached prompts.
    `leaves_rows_out`: those of earlier prompts are not sent again, for their reader keeps what it made of them.
    `shares_card`: the stage's card has the engines of all others too.
    `options`: the stage's own, which its family reads.
    """

    stage_id: int
    model_stage: str
    family: str
    rows_kind: str = ""
    takes_rows: bool = False
    max_payload_elements: int = 1 << 28
    max_decode_steps: int = 1
    kept_rows_bytes: int = 0
    leaves_rows_out: bool = False
    shares_card: bool = False
    has_residual_codes: bool = False
    rows_at: RowsAt = "all"
    has_rows_out: bool = False
    takes_ids: bool = False
    penalises_prompts: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> OmniModelConfig:
        return cls(**vllm_config.additional_config[ADDITIONAL_KEY])  # type: ignore[index]

    def to_additional_config(self) -> dict[str, Any]:
        """Plain values only: vLLM hashes them."""
        return {ADDITIONAL_KEY: asdict(self)}


@dataclass
class OmniEngineArgs(AsyncEngineArgs):
    """vLLM's engine arguments for one stage, with our worker, scheduler and executor chosen by vLLM's own hooks."""

    def __post_init__(self) -> None:
        # Our mixins are for the V1 runner (docs/extend/upgrading.md); vLLM has no other switch. Children inherit it.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # A forked engine could not use CUDA once this process has, and a stage may run its model in this process.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        super().__post_init__()

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
        """vLLM's, with the scheduler that fits it; here it configures logging, once in a process."""
        with log_buffers_kept():
            config = super().create_engine_config(*args, **kwargs)
        _use_scheduler_of(config.scheduler_config)
        return config

    @classmethod
    def for_ar_stage(
        cls,
        stage: StageConfig,
        pipeline: PipelineConfig,
        model: str,
        spec: ARSpec,
        adapters: Sequence[LoraAdapter] = (),
    ) -> OmniEngineArgs:
        """Raises ConfigError for a spec of which no engine is made, or an engine argument that vLLM does not know."""
        _check_buffers(stage, spec)
        # Rows of later positions go out with the steps that compute them, one position each.
        has_steps = (spec.takes_rows or spec.takes_ids) and not (spec.emits_rows and spec.rows_at == "all")
        # vLLM's adapters are laid out for the tokens of a step's first pass.
        has_steps = has_steps and not adapters
        model_config = OmniModelConfig(
            stage.stage_id,
            stage.model_stage,
            pipeline.family,
            spec.rows_kind,
            spec.takes_rows,
            pipeline.limits.max_payload_elements,
            stage.max_decode_steps if has_steps else 1,
            pipeline.handover.kept_rows_bytes if spec.emits_rows else 0,
            _is_remembered(stage, pipeline, spec),
            has_residual_codes=spec.has_residual_codes,
            rows_at=spec.rows_at,
            has_rows_out=spec.has_rows_out,
            takes_ids=spec.takes_ids,
            penalises_prompts=spec.penalises_prompts,
        )
        traits = spec.traits
        # What vLLM's metrics name as their model; the folder of the checkpoint is that of all stages.
        settings = {"served_model_name": stage.model_stage} | _ar_defaults(traits) | _checked(stage)
        settings |= lora_args(stage, adapters)
        settings["mm_processor_cache_gb"] = pipeline.limits.kept_media_bytes / GIB
        os.environ["VLLM_XGRAMMAR_CACHE_MB"] = str(pipeline.limits.kept_grammars_bytes >> 20)  # no other switch
        if model_config.max_decode_steps > 1:
            settings["async_scheduling"] = _waits_for_tokens(stage)
            _check_attention(stage)
        return cls(
            model=model,
            worker_cls=AR_WORKER,
            scheduler_cls=ASYNC_SCHEDULER,
            additional_config=model_config.to_additional_config(),
            tensor_parallel_size=stage.tensor_parallel_size,
            pipeline_parallel_size=stage.pipeline_parallel_size,
            distributed_executor_backend=_executor_of(stage),
            hf_overrides=traits.hf_overrides or {},
            **settings,
        )

    @classmethod
    def for_sound_stage(cls, stage: StageConfig, pipeline: PipelineConfig, model: str) -> OmniEngineArgs:
        """Device, memory and distributed set-up only: the worker loads a model of its own."""
        model_config = OmniModelConfig(
            stage.stage_id,
            stage.model_stage,
            pipeline.family,
            shares_card=all_share_a_card(pipeline.stages),
            options=stage.all_options,
        )
        return cls(
            model=model,
            worker_cls=SOUND_WORKER,
            additional_config=model_config.to_additional_config(),
            distributed_executor_backend=_executor(own_process=stage.gpus_per_replica > 0),
            **(_SOUND_DEFAULTS | _checked(stage)),
        )


def _check_buffers(stage: StageConfig, spec: ARSpec) -> None:
    has_buffers = spec.takes_rows or spec.takes_ids or spec.has_rows_out or spec.has_residual_codes
    if stage.pipeline_parallel_size > 1 and has_buffers:
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}): pipeline_parallel_size is "
            f"{stage.pipeline_parallel_size}, and one group of layers only takes hidden states; set it to 1."
        )
    if spec.emits_rows and spec.has_residual_codes:
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}): its spec emits hidden states and has_residual_codes, and "
            f"a step's output has one of them; leave one out."
        )


def _ar_defaults(traits: EngineTraits) -> dict[str, Any]:
    sizes = HOST_BOUND_SIZES if traits.is_host_bound else CAPTURE_SIZES
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    if not traits.is_compiled:
        # torch.compile would not fuse the model's operations, and vLLM's own kernels, which do, would be off.
        compilation |= {"mode": CompilationMode.NONE, "cudagraph_mode": "FULL_DECODE_ONLY"}
    defaults: dict[str, Any] = {
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "compilation_config": compilation,
        "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": MAX_SPLITS},
        "structured_outputs_config": StructuredOutputsConfig(**SETTINGS),
    }
    if not traits.has_tokenizer:
        # The checkpoint's generation_config speaks of text: its eos would be a legal code here.
        defaults |= {"skip_tokenizer_init": True, "generation_config": "vllm"}
    return defaults


def _is_remembered(stage: StageConfig, pipeline: PipelineConfig, spec: ARSpec) -> bool:
    """Whether all stages that read this one have a prefix cache for what they make of its rows.

    Of rows of media alone they make no blocks that are the prompt's.
    """
    readers = [each for each in pipeline.stages if stage.stage_id in each.engine_input_source]
    return spec.rows_at != "media" and all(each.engine_args.get("enable_prefix_caching", True) for each in readers)


def _checked(stage: StageConfig) -> dict[str, Any]:
    known = {f.name for f in fields(AsyncEngineArgs)}
    unknown = sorted(set(stage.engine_args) - known)
    if unknown:
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}): engine_args.{unknown[0]} is no vLLM engine argument; "
            f"use names of vLLM's EngineArgs, for example max_num_seqs."
        )
    return dict(stage.engine_args)


def _waits_for_tokens(stage: StageConfig) -> bool:
    """False, vLLM's word for an engine that waits for a step's tokens: only then it knows how many there are."""
    if stage.engine_args.get("async_scheduling"):
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}): engine_args.async_scheduling is true, which goes with one "
            f"token a step only; leave it out, or set max_decode_steps to 1."
        )
    return False


def _check_attention(stage: StageConfig) -> None:
    """Later steps have their lengths on the device; the host's are an upper bound, which FlashInfer would attend to."""
    given = stage.engine_args.get("attention_config")
    in_config = given.get("backend") if isinstance(given, Mapping) else None
    named = {"attention_backend": stage.engine_args.get("attention_backend"), "attention_config.backend": in_config}
    for key, backend in named.items():
        if str(backend).upper() == FLASHINFER:
            raise ConfigError(
                f"stage {stage.stage_id} ({stage.model_stage}): engine_args.{key} is {backend!r}, which goes with one "
                f"token a step only; leave it out, or set max_decode_steps to 1."
            )


def _use_scheduler_of(config: SchedulerConfig) -> None:
    """vLLM takes asynchronous scheduling back on a CPU and for layers in groups; counting ahead is wrong there."""
    if config.scheduler_cls == ASYNC_SCHEDULER and not config.async_scheduling:
        config.scheduler_cls = SCHEDULER


def _executor_of(stage: StageConfig) -> str | type[Executor]:
    if stage.hosts_per_replica == 1:
        return _executor(own_process=stage.num_parts > 1)
    from omni_cluster.vllm_engine.hosts_executor import hosts_executor  # imports what only such a stage needs

    return hosts_executor()


def _executor(*, own_process: bool) -> str:
    # Inside a Ray placement group vLLM would silently choose its Ray executor for tensor parallelism. A sound
    # model on a card gets a process too, as an AR engine has: launching its kernels would hold up the requests of this
    # one, which may also see other cards than the stage should.
    return "mp" if own_process else IN_PROCESS_EXECUTOR
