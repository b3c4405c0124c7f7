"""From a configuration to its family and its stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omni_cluster.config.loader import check_options
from omni_cluster.config.plan import in_data_order
from omni_cluster.config.schema import PRESET_PREFIX, PipelineConfig, StageConfig
from omni_cluster.models.checkpoint_files import checkpoint_folder
from omni_cluster.models.family import Family
from omni_cluster.models.lora import LoraAdapter, check_fit, read_adapters
from omni_cluster.models.registry import family_class
from omni_cluster.models.stage import Stage
from omni_cluster.models.stage_spec import ARSpec, PlainSpec, SoundFacts, SoundSpec, StageSpec
from omni_cluster.types.errors import ConfigError, PromptTooLong, RequestError
from omni_cluster.types.inputs import OmniRequest, Prompt
from omni_cluster.types.modalities import Modality, not_made
from omni_cluster.vllm_engine.known_warnings import drop_known_warnings
from omni_cluster.vllm_engine.version_check import check_vllm


@dataclass(frozen=True, slots=True)
class BoundPipeline:
    """A configuration and its checkpoint: `folder` holds the checkpoint's files, `family` reads them."""

    config: PipelineConfig
    folder: Path
    family: Family

    def check(self, request: OmniRequest) -> None:
        """Raises RequestError for a voice, an adapter or a stage that does not exist, and for what no stage makes.

        PromptTooLong for one whose tokens are counted already: others are counted by the stage that reads them.
        """
        self.check_made(request.modalities)
        self.family.check_voice(request.voice)
        for field, value in request.speaking.items():
            self.family.check_speaking(field, value)
        if request.adapter and request.adapter not in (names := self.config.adapters):
            raise RequestError(f"adapter is {request.adapter!r}; use {', '.join(names) or 'none, for there are none'}.")
        unknown = sorted(set(request.sampling) - set(self.family.stages))
        if unknown:
            raise RequestError(f"sampling names stage {unknown[0]!r}; use {', '.join(self.family.stages)}.")
        token_ids = request.prompt.token_ids if isinstance(request.prompt, Prompt) else None
        if token_ids is not None and len(token_ids) > (most := self.config.limits.max_prompt_tokens):
            raise PromptTooLong.of(f"at least {len(token_ids)} tokens", most)

    def adapter_of(self, model: str) -> str:
        """The LoRA adapter that a request asks for by its `model`; "" for none."""
        return model if model in self.config.adapters else ""

    def check_made(self, modalities: Sequence[Modality]) -> None:
        """Raises RequestError for what no stage makes."""
        if wrong := not_made(modalities, self.made):
            raise RequestError(f"modalities is {json.dumps(modalities)}, but {wrong}.")

    def stages_for(self, request: OmniRequest) -> list[StageConfig]:
        """The stages that a request needs, sources before consumers: those that lead to what it asks for."""
        ordered = in_data_order(self.config.stages)
        needed = {s.stage_id for s in ordered if s.final_output_type in request.modalities}
        for stage in reversed(ordered):
            if stage.stage_id in needed:
                needed.update(stage.engine_input_source)
        return [s for s in ordered if s.stage_id in needed]

    def source(self, stage: StageConfig) -> StageConfig | None:
        """The stage that feeds this one."""
        sources = stage.engine_input_source
        return next((s for s in self.config.stages if s.stage_id in sources), None)

    def consumers(self, stage: StageConfig) -> list[StageConfig]:
        return [s for s in self.config.stages if stage.stage_id in s.engine_input_source]

    def is_read_for_rows(self, stage: StageConfig) -> bool:
        """Whether a stage behind it needs its rows, which are kept nowhere: it makes them again."""
        return any("rows" in self.spec(each).reads for each in self.consumers(stage))

    @property
    def made(self) -> set[Modality]:
        """What answers can be made of here."""
        return {stage.final_output_type for stage in self.config.stages if stage.final_output_type is not None}

    @property
    def sound(self) -> SoundFacts | None:
        """What is known of the sound; None where no stage makes any."""
        return next((spec for spec in self.specs.values() if isinstance(spec, SoundFacts)), None)

    @property
    def sample_rate_hz(self) -> int:
        """Of the sound; 0 where there is none."""
        return self.sound.sample_rate_hz if self.sound is not None else 0

    @property
    def specs(self) -> dict[str, StageSpec]:
        """What the family says of the stages that are here."""
        return {stage.model_stage: self.spec(stage) for stage in self.config.stages}

    def spec(self, stage: StageConfig) -> StageSpec:
        """What the family says of the stage."""
        return self.family.specs[stage.model_stage]


def spec_class(stage: StageConfig, config: PipelineConfig) -> type[StageSpec]:
    """What the family says of the stage, whatever the checkpoint."""
    return family_class(config.family).stages[stage.model_stage]


def runs_on_vllm(stage: StageConfig, config: PipelineConfig) -> bool:
    """Whether its engine is vLLM's, with processes and metrics of its own."""
    return issubclass(spec_class(stage, config), ARSpec)


def uses_vllm(stage: StageConfig, config: PipelineConfig) -> bool:
    """Whether its engine or its worker is vLLM's."""
    return not issubclass(spec_class(stage, config), PlainSpec)


def bind(config: PipelineConfig) -> BoundPipeline:
    """Finds or makes the checkpoint; ConfigError for a stage, a voice or what an adapter changes that it lacks."""
    check_stages(config)
    cls = family_class(config.family)
    folder = checkpoint_folder(config.model, cls.embedded_checkpoint)
    family = cls(folder, config.default_voice, config.voices)
    _check_aliases(config, family)
    for stage in config.stages:
        check_fit(read_adapters(stage, cls.stages[stage.model_stage].lora_prefixes), folder)
    return BoundPipeline(config, folder, family)


def _check_aliases(config: PipelineConfig, family: Family) -> None:
    for alias, voice in config.api.voice_aliases.items():
        if voice not in family.voices:
            raise ConfigError(
                f"advanced.api.voice_aliases.{alias} is {voice!r}; use one of {', '.join(family.voices)}."
            )


def check_stages(config: PipelineConfig) -> None:
    """Raises ConfigError for stages that the family lacks, or that have another source, options or adapters there, and
    for what their engines would not look at.
    """
    family = family_class(config.family)
    _check_preset(config.model, family)
    for number, stage in enumerate(config.stages):
        if stage.model_stage not in family.stages:
            raise ConfigError(
                f"stage {stage.stage_id}: model_stage is {stage.model_stage!r}; "
                f"{family.name} has {', '.join(family.stages)}."
            )
        _check_source(stage, config, family)
        _check_sound(stage, number, family.stages[stage.model_stage])
        _check_signals(stage, number, family.stages[stage.model_stage])
        check_options(family.stages[stage.model_stage].Options, stage, f"stages[{number}]")
        read_adapters(stage, family.stages[stage.model_stage].lora_prefixes)


def adapters_of(config: PipelineConfig) -> list[LoraAdapter]:
    """Of all stages. Raises AdapterError for one that its stage cannot take, whatever the checkpoint."""
    stages = family_class(config.family).stages
    return [each for stage in config.stages for each in read_adapters(stage, stages[stage.model_stage].lora_prefixes)]


def _check_preset(model: str, family: type[Family]) -> None:
    presets = [PRESET_PREFIX + name for name in family.presets]
    if model.startswith(PRESET_PREFIX) and model not in presets:
        use = f"use {' or '.join(presets)}" if presets else "name a folder"
        raise ConfigError(f"model is {model!r}; no such preset exists, {use}.")


def _check_source(stage: StageConfig, config: PipelineConfig, family: type[Family]) -> None:
    given = [s.model_stage for s in config.stages if s.stage_id in stage.engine_input_source]
    wanted = family.stages[stage.model_stage].source
    if given != ([wanted] if wanted else []):
        fed_by = next((f"[{s.stage_id}]" for s in config.stages if s.model_stage == wanted), f"the id of {wanted}")
        raise ConfigError(
            f"stage {stage.stage_id} ({stage.model_stage}): engine_input_source is {stage.engine_input_source}; "
            f"{family.name} needs {fed_by if wanted else '[]'} there."
        )


def _check_sound(stage: StageConfig, number: int, spec: type[StageSpec]) -> None:
    """The engine of sound has its model whole on one device, and samples nothing."""
    if not issubclass(spec, SoundSpec):
        return
    where, name = f"stages[{number}]", stage.model_stage
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (parts := getattr(stage, key)) > 1:
            fix = f"the model of {name} is not split, set it to 1, and num_replicas for more cards"
            raise ConfigError(f"{where}.advanced.{key} is {parts}; {fix}.")
    if given := stage.default_sampling_params:
        key, value = next(iter(given.items()))
        raise ConfigError(f"{where}.default_sampling_params.{key} is {value!r}; {name} samples nothing, leave it out.")


def _check_signals(stage: StageConfig, number: int, spec: type[StageSpec]) -> None:
    """A signal that its replicas never say would be 0 for ever: the stage would not grow."""
    if stage.autoscaling is None:
        return
    is_said = {
        "max_requests": True,
        "max_kv_use": issubclass(spec, ARSpec),
        "max_backlog_tokens": not spec.emits.isdisjoint({"text", "codes"}),
        "max_slack_use": issubclass(spec, SoundSpec),
    }
    for name, value in stage.autoscaling.signals.model_dump(exclude_none=True).items():
        if not is_said[name]:
            raise ConfigError(
                f"stages[{number}].advanced.autoscaling.signals.{name} is {value:g}; {stage.model_stage} has no such "
                f"signal, use {' or '.join(each for each, said in is_said.items() if said)}."
            )


def make_stage(stage: StageConfig, bound: BoundPipeline, stat_loggers: Sequence[type] = ()) -> Stage:
    """A stage that is not started yet. vLLM is imported here if the stage uses it, and it was not before.

    `stat_loggers`: for a stage that samples tokens, what counts of its engine's steps (vLLM's `StatLoggerFactory`).
    """
    counting = {"stat_loggers": stat_loggers} if stat_loggers else {}
    return stage_class(stage, bound.config)(stage, bound.config, bound.spec(stage), str(bound.folder), **counting)


def stage_class(stage: StageConfig, config: PipelineConfig) -> Callable[..., Stage]:
    """What `make_stage` calls. Imports vLLM for a stage that uses it. Raises VersionError for one it cannot run on."""
    if not uses_vllm(stage, config):
        return _plain_stage
    drop_known_warnings()
    check_vllm()
    if runs_on_vllm(stage, config):
        from omni_cluster.vllm_engine.stage_llm import StageLLM

        return StageLLM
    from omni_cluster.engine.sound.engine import SoundEngine

    return SoundEngine


def _plain_stage(stage: StageConfig, pipeline: PipelineConfig, spec: PlainSpec, model: str) -> Stage:
    return spec.stage(stage, pipeline)
