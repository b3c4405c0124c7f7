"""What a family says of each of its stages. The ingress reads it, so nothing here imports torch or vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from omni_cluster.config.limits import Limits
from omni_cluster.config.problems import Strict
from omni_cluster.config.schema import DiffusionConfig, PipelineConfig, StageConfig
from omni_cluster.config.traits import EngineTraits
from omni_cluster.errors import ConfigError
from omni_cluster.inputs import OmniRequest
from omni_cluster.memory.sizes import ARSizes, DiffusionSizes, StageSizes
from omni_cluster.models.stage import Stage
from omni_cluster.outputs import StageChunk

if TYPE_CHECKING:
    import torch

    from omni_cluster.models.family import ARSession, Family, Hold
    from omni_cluster.models.sound import SoundModel, SoundSession

Part = Literal["text", "codes", "rows", "sound"]
"""What one stage makes that another one, or the client, reads."""


class NoOptions(Strict):
    """Of a stage that has none."""


class StageSpec(ABC):
    """One stage of a family, bound to the family's checkpoint."""

    name: ClassVar[str]
    source: ClassVar[str | None] = None
    """The stage that feeds it; None: the request does."""
    emits: ClassVar[frozenset[Part]]
    reads: ClassVar[frozenset[Part]] = frozenset()
    """What it needs of its source. A source that had ended is not computed again for parts that are known."""
    samples_tokens: ClassVar[bool] = False
    """Whether requests may say how it samples."""
    Options: ClassVar[type[Strict]] = NoOptions
    """What `options` of the stage in the configuration may be."""

    @abstractmethod
    def __init__(self, family: Family) -> None: ...

    @property
    @abstractmethod
    def sizes(self) -> StageSizes:
        """What the stage's memory is computed from."""

    @classmethod
    def most_tokens(cls, limits: Limits, sampling: Mapping[str, Any]) -> int:
        """Tokens that it may make of one request, which samples by `sampling`."""
        most = limits.max_output_tokens if "text" in cls.emits else limits.max_codec_tokens
        return min(sampling.get("max_tokens") or most, most)


class PlainSpec(StageSpec):
    """A stage with an engine of the family's own, in the process of its replica."""

    @property
    def sizes(self) -> StageSizes:
        """Raises ConfigError: there is nothing to place on a card."""
        raise ConfigError(f"stage {self.name} runs on no card; set its num_gpus to 0.")

    @abstractmethod
    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        """The stage, not started yet; `config.options` were validated by `Options`."""


class ARSpec(StageSpec):
    """A stage that samples tokens, on vLLM's engine."""

    samples_tokens = True

    @property
    @abstractmethod
    def traits(self) -> EngineTraits:
        """How its engine differs from a plain one."""

    @property
    def emits_rows(self) -> bool:
        """Whether requests may ask for a row a position."""
        return "rows" in self.emits

    @property
    def takes_rows(self) -> bool:
        """Whether the model has a buffer `extra_rows`, for rows that come from its source."""
        return "rows" in self.reads

    @property
    @abstractmethod
    def sizes(self) -> ARSizes: ...

    @abstractmethod
    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        """`request` has its media only in a stage that no other feeds. `hold`: of the stage's engine."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """`base_s` for a call, and `frame_s` for each frame of its jobs."""

    base_s: float
    frame_s: float


@dataclass(frozen=True, slots=True)
class SoundPriors:
    """What is assumed of a sound model on a card until its own calls are measured.

    `step`: of the model alone on its card; `shared_step` and `shared_finish`: beside other stages. `fitted_frames`: the
    two sizes of a step at which the assumed cost counts. `finish_frames`: so many frames of jobs that have had all
    their steps are worth a call that finishes them. `piece_frames`: of a piece for a player that is short of sound.
    `newcomer_steps`: steps of a job that comes now which count against larger ones. `early_pieces`: pieces that follow
    a stream's first one before it has sound for several rounds. `cushion_s`: what a player has when a round begins.
    """

    step: LinearCost
    shared_step: LinearCost
    shared_finish: LinearCost
    fitted_frames: tuple[int, int]
    finish_frames: int
    piece_frames: float
    newcomer_steps: int
    early_pieces: int
    cushion_s: float


class SoundFacts(ABC):
    """What is known of a stage's sound, whatever engine makes it. A code has one value of each codebook."""

    @property
    @abstractmethod
    def sample_rate_hz(self) -> int: ...

    @property
    @abstractmethod
    def samples_per_code(self) -> int: ...

    @property
    def codes_per_s(self) -> float:
        """Codes of a second of sound."""
        return self.sample_rate_hz / self.samples_per_code


class SoundSpec(SoundFacts, StageSpec):
    """A stage that makes sound of codes, on our engine: several steps of a flow, or one causal step."""

    priors: ClassVar[SoundPriors]
    emits = frozenset({"sound"})
    reads = frozenset({"codes"})

    @property
    @abstractmethod
    def sizes(self) -> DiffusionSizes: ...

    @abstractmethod
    def session(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk], config: DiffusionConfig
    ) -> SoundSession: ...

    @abstractmethod
    def model(self, device: torch.device, config: DiffusionConfig) -> SoundModel:
        """Loads the weights, in the dtypes and for the streams that `config` says."""


def by_name(*specs: type[StageSpec]) -> Mapping[str, type[StageSpec]]:
    return {spec.name: spec for spec in specs}
