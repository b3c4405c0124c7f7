"""What a family says of each of its stages. The ingress reads it, so nothing here imports torch or vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from omni_cluster.config.limits import Limits
from omni_cluster.config.problems import Strict
from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.config.traits import EngineTraits
from omni_cluster.memory.sizes import ARSizes, SoundSizes, StageSizes
from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import ConfigError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

if TYPE_CHECKING:
    import torch

    from omni_cluster.models.family import ARSession, Family, Hold
    from omni_cluster.models.sound import SoundModel, SoundPriors, SoundSession

Part = Literal["text", "codes", "rows", "sound", "image"]
"""What one stage makes that another one, or the client, reads."""
RowsAt = Literal["all", "prompt", "media"]
"""Which positions have rows: all, those of the prompt with a reply that is given in it, or those of its media."""


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

    lora_prefixes: ClassVar[Mapping[str, str]] = {}
    """What LoRA adapters may change: how names of linear layers begin in an adapter, with how the checkpoint's begin;
    `*` is the number of a layer, the same in both. Without any the stage takes no adapters."""

    @abstractmethod
    def __init__(self, family: Family) -> None: ...

    @abstractmethod
    def sizes(self, config: StageConfig) -> StageSizes:
        """What the stage's memory is computed from."""

    def options(self, config: StageConfig) -> Strict:
        """What the configuration says to the stage; `engine.build.check_stages` let it pass."""
        return self.Options.model_validate(config.all_options)

    @property
    def vocab_size(self) -> int | None:
        """Tokens that its model samples from; None: its engine alone knows, and refuses others once it is asked."""
        return None

    @classmethod
    def most_tokens(cls, limits: Limits, sampling: Mapping[str, Any]) -> int:
        """Tokens that it may make of one request, which samples by `sampling`."""
        most = limits.max_output_tokens if "text" in cls.emits else limits.max_codec_tokens
        return min(sampling.get("max_tokens") or most, most)


class PlainSpec(StageSpec):
    """A stage with an engine of the family's own, in the process of its replica."""

    def sizes(self, config: StageConfig) -> StageSizes:
        """Raises ConfigError: there is nothing to place on a card."""
        raise ConfigError(f"stage {self.name} runs on no card; set its num_gpus to 0.")

    @abstractmethod
    def stage(self, config: StageConfig, pipeline: PipelineConfig) -> Stage:
        """The stage, not started yet; `config.all_options` were validated by `Options`."""


class ARSpec(StageSpec):
    """A stage that samples tokens, on vLLM's engine."""

    samples_tokens = True
    rows_kind: ClassVar[str] = ""
    """The family's name of the rows that it emits; they travel by it."""
    rows_at: ClassVar[RowsAt] = "all"
    has_rows_out: ClassVar[bool] = False
    """Whether `forward` of its model writes the rows that it emits to a buffer `rows_out` `[max_num_batched_tokens, H]`
    of one address; else a row is the last hidden state plus the token's embedding, which is zero for media."""
    penalises_prompts: ClassVar[bool] = True
    """Whether the repetition penalty counts a prompt's tokens as seen; False: those of the output alone."""
    takes_ids: ClassVar[bool] = False
    """Whether the model has a buffer `extra_ids`, int32 `[max_num_batched_tokens]`: before a step the engine writes the
    ids beside its positions there, `NO_ID` where there are none."""
    has_residual_codes: ClassVar[bool] = False
    """Whether its model is an `AfterSampling`, which makes more codes of each token. Such a stage emits no rows."""
    codeless_ends: ClassVar[frozenset[str]] = frozenset({"stop"})
    """Finish reasons of a stage of codes whose last token is none."""

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
        """Whether the model has a buffer `extra_rows`: rows that come from its source, or that its session makes."""
        return "rows" in self.reads

    @abstractmethod
    def sizes(self, config: StageConfig) -> ARSizes: ...

    @abstractmethod
    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        """`request` has its media only in a stage that no other feeds. `hold`: of the stage's engine."""


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

    Options: ClassVar[type[SoundOptions]]

    @abstractmethod
    def sizes(self, config: StageConfig) -> SoundSizes: ...

    def options(self, config: StageConfig) -> SoundOptions:
        """See `StageSpec.options`."""
        return self.Options.model_validate(config.all_options)

    @abstractmethod
    def session(
        self, request: OmniRequest, upstream: AsyncIterator[StageChunk], options: SoundOptions
    ) -> SoundSession: ...

    @abstractmethod
    def model(self, device: torch.device, options: SoundOptions, shares_card: bool) -> SoundModel:
        """Loads the weights, for as many streams and as large steps as `options` says.

        `shares_card`: the card is that of all other stages too, whose kernels the model's own wait for.
        """


def by_name(*specs: type[StageSpec]) -> Mapping[str, type[StageSpec]]:
    return {spec.name: spec for spec in specs}
