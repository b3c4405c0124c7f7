"""What a deployment is: the pydantic models of a stage YAML and the rules that hold between its stages."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from omni_cluster.config.access import ApiConfig
from omni_cluster.config.advanced import PUBLIC
from omni_cluster.config.autoscaling import AutoscalingConfig
from omni_cluster.config.caches import HostFolder
from omni_cluster.config.devices import device_problems
from omni_cluster.config.engine_sizes import size_problems
from omni_cluster.config.graph import graph_problems
from omni_cluster.config.handover import HandoverConfig
from omni_cluster.config.limits import Limits
from omni_cluster.config.lora import RESERVED as RESERVED_BY_ADAPTERS
from omni_cluster.config.lora import AdapterName, lora_problems
from omni_cluster.config.media import DecodersConfig, FetchConfig
from omni_cluster.config.placement import PlacementConfig
from omni_cluster.config.problems import Problem, Strict, refuse
from omni_cluster.types.modalities import Modality, not_made
from omni_cluster.types.sampling import sampling_faults

PRESET_PREFIX = "preset:"
RESERVED_ENGINE_ARGS = {
    "model": "set the key model of the whole file instead",
    "tensor_parallel_size": "set advanced.tensor_parallel_size next to engine_args instead",
    "worker_cls": "remove it, the family chooses the worker",
    "scheduler_cls": "remove it, the family chooses the scheduler",
    "hf_overrides": "remove it, the family chooses the part of the checkpoint's config",
    "additional_config": "remove it, it carries the stage's own settings",
    "enable_prompt_embeds": "remove it, a stage gets hidden states from its source alone",
    "trust_remote_code": "remove it, a checkpoint's own code is never run",
    "pipeline_parallel_size": "set advanced.pipeline_parallel_size next to engine_args instead",
    "mm_processor_cache_type": "remove it, only vLLM's default tells of media that the engine lacks",
    "mm_processor_cache_gb": "set advanced.limits.kept_media_bytes instead",
    "data_parallel_size": "remove it, num_replicas gives a stage more engines",
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "remove it, a rejected draft token would emit a hidden state",
    ),
    "scheduling_policy": "remove it, all requests have one priority",
    "disable_cascade_attn": "remove it, vLLM has no cascade attention any more",
    "kv_transfer_config": "remove it, keys and values from elsewhere have no hidden states",
    "kv_offloading_size": "remove it, keys and values that come back have no hidden states",
    "distributed_executor_backend": "remove it, hosts_per_replica and the number of parts choose it",
    **RESERVED_BY_ADAPTERS,
}


class StageConfig(Strict):
    """One stage: what it runs, on which devices, in how many replicas, and which stages feed it."""

    stage_id: int = Field(
        ge=0,
        description="Number of the stage, by which `engine_input_source` names it.",
        examples=[0],
        json_schema_extra=PUBLIC,
    )
    model_stage: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$",
        description="The family's name of the stage.",
        examples=["thinker"],
        json_schema_extra=PUBLIC,
    )
    engine_input_source: list[int] = Field(
        default_factory=list,
        description="Ids of the stages that feed this one; none: the request does. The family says which stage feeds "
        "which, and refuses another one.",
        examples=[[0]],
        json_schema_extra=PUBLIC,
    )
    gpus: list[int] | None = Field(
        default=None,
        min_length=1,
        description="Numbers of the cards of its replicas, on one host; in the place of `num_gpus`.",
        examples=[[0]],
        json_schema_extra=PUBLIC,
    )
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs of one replica, as a Ray resource; 0: it runs on the CPU; a fraction shares a card. Required "
        "without `gpus`.",
        examples=[1],
        json_schema_extra=PUBLIC,
    )
    num_cpus: float = Field(default=1.0, ge=0, description="CPUs of one replica, as a Ray resource.", examples=[1])
    placement: PlacementConfig = Field(
        default=PlacementConfig(),
        description="Nodes that its replicas may run on.",
        examples=[{"label_selector": {"role": "speech"}}],
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Parts of every layer. A replica has as many cards as this times `pipeline_parallel_size`.",
        examples=[1],
    )
    pipeline_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Groups of layers; above 1 for a stage that takes no hidden states.",
        examples=[1],
    )
    hosts_per_replica: int = Field(
        default=1, ge=1, description="Hosts that the parts of one replica's model are on.", examples=[1]
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's engine arguments. Those that the family or another key decides are refused by name.",
        examples=[{"max_model_len": 32_768}],
        json_schema_extra=PUBLIC,
    )
    lora_adapters: dict[AdapterName, HostFolder] = Field(
        default_factory=dict,
        description="LoRA adapters of a stage that takes some: the folder of each, in PEFT's format, by the name that "
        "requests have as their `model`.",
        examples=[{"support": "/models/support-lora"}],
    )
    card_priority: Literal["normal", "low"] = Field(
        default="normal",
        description="Under NVIDIA's MPS: `low` lets the other stages of the card go first.",
        examples=["low"],
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of each of its cards that are the stage's; not set: computed, and the KV caches share what is "
        "left.",
        examples=[24],
    )
    expected_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of a sequence that the KV cache is sized for, times `max_num_seqs`; not set: "
        "`max_model_len`.",
        examples=[4_096],
    )
    # Eight hide most of what an engine does around a step; rows that come and requests that start wait for its end.
    max_decode_steps: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Tokens of a request in one step of the engine at most, where it takes hidden states of another "
        "stage; 1 lets these and new requests in after each.",
        examples=[8],
    )
    default_sampling_params: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's sampling parameters. They win over the checkpoint's `generation_config.json`, which holds "
        "for the stage of the text, and a request's win over them.",
        examples=[{"max_tokens": 1024}],
        json_schema_extra=PUBLIC,
    )
    # Generous: a prefill on a CPU, or a kernel's first compilation, is one step. A stopped process is seen in seconds.
    stall_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds after which a replica that has work and takes no step, or does not answer, is ended and "
        "replaced. Longer than its longest step: a prefill chunk on a CPU, a kernel's first compilation.",
        examples=[120.0],
    )
    num_replicas: int | None = Field(
        default=None,
        ge=1,
        description="Fixed number of replicas; not set: 1, or what `autoscaling` says.",
        examples=[1],
        json_schema_extra=PUBLIC,
    )
    standby_replicas: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Replicas beside `num_replicas`, ready and idle, that take requests only while one of those is "
        "lost.",
        examples=[1],
    )
    autoscaling: AutoscalingConfig | None = Field(
        default=None,
        description="Replicas that follow the load, in the place of `num_replicas`.",
        examples=[{"max_replicas": 4, "signals": {"max_requests": 24}}],
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="The family's options of the stage, checked before anything starts.",
        examples=[{}],
        json_schema_extra=PUBLIC,
    )
    advanced_options: dict[str, Any] = Field(
        default_factory=dict, description="The family's further options of the stage.", examples=[{}]
    )
    final_output_type: Modality | None = Field(
        default=None,
        description="What the client gets from this stage; not set: nothing.",
        examples=["text"],
        json_schema_extra=PUBLIC,
    )

    @property
    def all_options(self) -> dict[str, Any]:
        """What `options` and `advanced.options` say together."""
        return {**self.options, **self.advanced_options}

    @property
    def gpus_per_replica(self) -> float:
        """GPUs that one replica holds; a fraction is a share of one card."""
        return float(len(self.gpus)) if self.gpus is not None else self.scheduled_gpus

    @property
    def scheduled_gpus(self) -> float:
        """Those of them that Ray chooses: none where the cards are named."""
        return float(self.num_gpus or 0)

    @property
    def num_parts(self) -> int:
        """Of the model; each has a process, and a card where there are cards."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def min_replicas(self) -> int:
        return self.autoscaling.min_replicas if self.autoscaling else self.max_replicas

    @property
    def may_sleep(self) -> bool:
        """Whether it may have no replica while no request needs it."""
        return self.min_replicas == 0

    @property
    def max_replicas(self) -> int:
        """Those that stand by are among them: they have their engines, and their part of a card."""
        return self.autoscaling.max_replicas if self.autoscaling else (self.num_replicas or 1) + self.standby_replicas

    @model_validator(mode="before")
    @classmethod
    def _one_replica_unless_told(cls, given: object) -> object:
        if isinstance(given, dict) and given.get("num_replicas") is None and given.get("autoscaling") is None:
            return {**given, "num_replicas": 1}
        return given

    @model_validator(mode="after")
    def _parts_fit(self) -> StageConfig:
        refuse([*device_problems(self), *_replica_problems(self), *_engine_arg_problems(self), *_part_problems(self)])
        refuse(_sampling_problems(self.default_sampling_params))
        return self


class PipelineConfig(Strict):
    """A whole deployment: a checkpoint, its family, and the stages that serve it."""

    model: str = Field(
        min_length=1,
        description="Checkpoint: a folder with the hub's layout, a name on the hub, or a toy: `preset:tiny`, random "
        "and made on first use; `preset:toy`, trained and in the package, where the family has one.",
        examples=["preset:tiny"],
        json_schema_extra=PUBLIC,
    )
    family: str = Field(
        min_length=1,
        description="Registered family of the model, which says what its stages are.",
        examples=["qwen2_5_omni"],
        json_schema_extra=PUBLIC,
    )
    default_voice: str | None = Field(
        default=None,
        description="Voice of requests that name none; not set: the checkpoint's first.",
        examples=["Chelsie"],
        json_schema_extra=PUBLIC,
    )
    voices: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Voices that requests may name; not set: all that the checkpoint has.",
        examples=[["Chelsie"]],
    )
    limits: Limits = Field(
        default=Limits(),
        description="What one request may ask, and how many run and wait.",
        examples=[{"max_prompt_tokens": 28_000}],
    )
    handover: HandoverConfig = Field(
        default=HandoverConfig(),
        description="What stages keep of what they pass on.",
        examples=[{"kept_rows_bytes": 1_073_741_824}],
    )
    api: ApiConfig = Field(
        default=ApiConfig(),
        description="API keys, quotas of a key, and defaults of the HTTP API.",
        examples=[{"keys_file": "keys.txt"}],
    )
    fetch: FetchConfig = Field(
        default=FetchConfig(), description="Media that requests name by URL.", examples=[{"timeout_s": 10.0}]
    )
    decoders: DecodersConfig = Field(
        default=DecodersConfig(), description="Processes that decode media.", examples=[{"processes": 4}]
    )
    cache_dir: HostFolder | None = Field(
        default=None,
        description="Folder on each host for what engines compile (Triton's kernels, graphs, tuning), from `/` or "
        "`~/`; not set: `~/.cache/omni_cluster/compiled`.",
        examples=["/var/cache/omni_cluster"],
    )
    ingress_replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that speak HTTP; one is busy with about 16 requests that come at once.",
        examples=[4],
        json_schema_extra=PUBLIC,
    )
    ingress_placement: PlacementConfig = Field(
        default=PlacementConfig(),
        description="Nodes that these may run on.",
        examples=[{"label_selector": {"role": "front"}}],
    )
    ray_metrics: bool = Field(
        default=True,
        description="Whether metrics of replicas and engines are on the metrics port of each Ray node too.",
        examples=[False],
    )
    stages: list[StageConfig] = Field(
        min_length=1,
        description="The stages, in any order.",
        examples=[[{"stage_id": 0, "model_stage": "thinker", "num_gpus": 1, "final_output_type": "text"}]],
        json_schema_extra=PUBLIC,
    )

    @field_validator("family")
    @classmethod
    def _family_known(cls, family: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get("known_families")
        if known is not None and family not in known:
            refuse([Problem("", family, f"no such family is registered, use one of {', '.join(sorted(known))}")])
        return family

    @model_validator(mode="after")
    def _parts_fit(self) -> PipelineConfig:
        refuse([*_voice_problems(self), *_modality_problems(self), *graph_problems(self.stages)])
        refuse([*_adapter_problems(self), *_ingress_problems(self)])
        return self

    @property
    def adapters(self) -> list[str]:
        """Names of LoRA adapters, of all stages."""
        return [name for stage in self.stages for name in stage.lora_adapters]

    @property
    def models(self) -> list[str]:
        """What requests may name as their model, the checkpoint first."""
        return [self.model, *self.adapters]


def _replica_problems(stage: StageConfig) -> list[Problem]:
    if stage.autoscaling is None:
        return []
    fixed = {"num_replicas": stage.num_replicas, "standby_replicas": stage.standby_replicas}
    fix = "autoscaling is set too, keep one of the two, for example autoscaling"
    return [Problem(name, count, fix) for name, count in fixed.items() if count]


def _engine_arg_problems(stage: StageConfig) -> list[Problem]:
    reserved = [
        Problem(f"engine_args.{name}", stage.engine_args[name], fix)
        for name, fix in RESERVED_ENGINE_ARGS.items()
        if name in stage.engine_args
    ]
    given = stage.engine_args
    return [
        *reserved,
        *_memory_problems(given),
        *size_problems(given),
        *_quantization_problems(given),
        *lora_problems(given),
    ]


def _memory_problems(engine_args: dict[str, Any]) -> list[Problem]:
    problems = []
    share = engine_args.get("gpu_memory_utilization")
    if share is not None and not (_is_number(share) and 0 < share <= 1):
        fix = "it must be a number above 0 and at most 1, for example 0.9"
        problems.append(Problem("engine_args.gpu_memory_utilization", share, fix))
    size_bytes = engine_args.get("kv_cache_memory_bytes")
    if size_bytes is not None and not (_is_number(size_bytes) and isinstance(size_bytes, int) and size_bytes > 0):
        fix = "it must be a whole number above 0, for example 67108864"
        problems.append(Problem("engine_args.kv_cache_memory_bytes", size_bytes, fix))
    return problems


def _quantization_problems(engine_args: dict[str, Any]) -> list[Problem]:
    given = engine_args.get("quantization_config")
    if given is None or isinstance(given, dict):
        return []
    fix = "it must be a mapping, for example {'moe': 'fp8_per_block'}"
    return [Problem("engine_args.quantization_config", given, fix)]


def _part_problems(stage: StageConfig) -> list[Problem]:
    if stage.memory_gib is None:
        return []
    if stage.gpus_per_replica == 0:
        return [Problem("memory_gib", stage.memory_gib, "the stage has no card, remove it, or set num_gpus: 1")]
    return [
        Problem("memory_gib", stage.memory_gib, f"engine_args.{name} is set too, keep one of the two")
        for name in ("gpu_memory_utilization", "kv_cache_memory_bytes")
        if stage.engine_args.get(name) is not None
    ]


def _sampling_problems(params: dict[str, Any]) -> list[Problem]:
    return [
        Problem(f"default_sampling_params.{name}", params[name], f"it should be {wish}")
        for name, wish in sampling_faults(params)
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ingress_problems(config: PipelineConfig) -> list[Problem]:
    if config.ingress_replicas <= (most := config.limits.max_ongoing_requests):
        return []
    fix = f"each lets one request run, so it must be at most limits.max_ongoing_requests, {most}"
    return [Problem("ingress_replicas", config.ingress_replicas, fix)]


def _voice_problems(config: PipelineConfig) -> list[Problem]:
    if config.voices is None or config.default_voice is None or config.default_voice in config.voices:
        return []
    fix = f"it is not among voices, use one of {config.voices}"
    return [Problem("default_voice", config.default_voice, fix)]


def _adapter_problems(config: PipelineConfig) -> list[Problem]:
    times = Counter(config.models)
    fix = "each model has a name of its own, use another one"
    return [
        Problem(f"stages[{number}].lora_adapters.{name}", folder, f"{name!r} is taken, {fix}")
        for number, stage in enumerate(config.stages)
        for name, folder in stage.lora_adapters.items()
        if times[name] > 1
    ]


def _modality_problems(config: PipelineConfig) -> list[Problem]:
    asked = config.api.default_modalities
    wrong = not_made(asked, {stage.final_output_type for stage in config.stages})
    return [Problem("api.default_modalities", asked, wrong)] if wrong else []
