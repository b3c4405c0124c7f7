"""From a configuration to its family and its stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.stage import Stage
from omni_cluster.errors import ConfigError
from omni_cluster.models.checkpoint_files import checkpoint_folder
from omni_cluster.models.family import Family, StageKind
from omni_cluster.models.registry import family_class


@dataclass(frozen=True, slots=True)
class BoundPipeline:
    """A configuration with its checkpoint at hand: `folder` holds the files, `family` knows their meaning."""

    config: PipelineConfig
    folder: Path
    family: Family

    def source(self, stage: StageConfig) -> StageConfig | None:
        """The stage that feeds this one."""
        sources = stage.engine_input_source
        return next((s for s in self.config.stages if s.stage_id in sources), None)

    def consumers(self, stage: StageConfig) -> list[StageConfig]:
        return [s for s in self.config.stages if stage.stage_id in s.engine_input_source]


def bind(config: PipelineConfig) -> BoundPipeline:
    """Finds or makes the checkpoint; ConfigError for a stage that the family does not have."""
    cls = family_class(config.family)
    for stage in config.stages:
        _check_stage(stage, cls)
    folder = checkpoint_folder(config.model, cls.embedded_checkpoint)
    return BoundPipeline(config, folder, cls(folder, config.default_voice, config.voices))


def _check_stage(stage: StageConfig, family: type[Family]) -> None:
    if stage.model_stage not in family.stages:
        raise ConfigError(
            f"stage {stage.stage_id}: model_stage is {stage.model_stage!r}; "
            f"{family.name} has {', '.join(family.stages)}."
        )
    if len(stage.engine_input_source) > 1:
        raise ConfigError(
            f"stage {stage.stage_id}: engine_input_source is {stage.engine_input_source}; "
            f"a stage of {family.name} takes one source, for example [{stage.engine_input_source[0]}]."
        )


def make_stage(stage: StageConfig, bound: BoundPipeline) -> Stage:
    """A stage that is not started yet. vLLM is imported here, not before."""
    kind = bound.family.stages[stage.model_stage]
    if kind is StageKind.AR:
        from omni_cluster.engine.stage_llm import StageLLM

        return StageLLM(stage, bound.config, bound.family, str(bound.folder))
    from omni_cluster.engine.diffusion_engine import DiffusionEngine

    return DiffusionEngine(stage, bound.config, bound.family, str(bound.folder))
