"""Code2wav's stage: codes in, sound out, by a causal network of one step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.memory.sizes import SoundSizes
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.qwen3_omni.code2wav import SAMPLE_RATE_HZ, Code2WavSession, Reach
from omni_cluster.models.qwen3_omni.memory import code2wav_sizes
from omni_cluster.models.qwen3_omni.options import Code2WavOptions
from omni_cluster.models.sound import LinearCost, SoundModel, SoundPriors, SoundSession
from omni_cluster.models.stage_spec import SoundSpec
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

if TYPE_CHECKING:
    import torch


class OfCheckpoint(Protocol):
    """What the stage asks of its family."""

    folder: Path


class Code2Wav(SoundSpec):
    """It knows neither voices nor seeds: codes alone say how they sound."""

    name = "code2wav"
    source = "talker"
    Options = Code2WavOptions
    # Of no card: by the sizes of its graphs and its arithmetic in bfloat16. Sizes are codes.
    priors = SoundPriors(
        step=LinearCost(2e-3, 2e-5),
        finish=LinearCost(3e-4, 1e-6),
        usual_sizes=(11, 1_024),
        worth_finishing=1,
        finish_ahead_s=0.02,
        # A newcomer waits for the rest of the step that runs, and for its own.
        newcomer_steps=2,
        # Eight codes, and those before them that are seen again.
        piece_size=18.0,
        # The sound of a first piece of one code.
        cushion_s=0.05,
    )

    def __init__(self, family: OfCheckpoint) -> None:
        self._family = family

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return read_config(self._family.folder)

    @cached_property
    def _reach(self) -> Reach:
        return Reach.from_config(self._config)

    @property
    def sample_rate_hz(self) -> int:
        return SAMPLE_RATE_HZ

    @property
    def samples_per_code(self) -> int:
        return self._reach.samples_per_code

    def sizes(self, config: StageConfig) -> SoundSizes:
        return code2wav_sizes(self._family.folder, cast(Code2WavOptions, self.options(config)))

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk], options: SoundOptions) -> SoundSession:
        sizes, most = self._config["code2wav_config"], cast(Code2WavOptions, options).max_piece_codes
        codes, codebooks = sizes["codebook_size"], sizes["num_quantizers"]
        return Code2WavSession(request, upstream, self._reach, codes, codebooks, most)

    def model(self, device: torch.device, options: SoundOptions, shares_card: bool) -> SoundModel:
        from omni_cluster.models.qwen3_omni.code2wav_model import load_model

        return load_model(self._family.folder, device, cast(Code2WavOptions, options))
