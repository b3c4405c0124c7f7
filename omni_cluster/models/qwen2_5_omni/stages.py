"""The three stages: the thinker answers in text, the talker says it in codes, code2wav makes sound of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.sound_options import SoundOptions
from omni_cluster.config.traits import EngineTraits
from omni_cluster.kernels.relied_on import DECODER
from omni_cluster.memory.sizes import ARSizes, SoundSizes
from omni_cluster.models.family import ARSession, Hold, StreamInterval
from omni_cluster.models.qwen2_5_omni import memory
from omni_cluster.models.qwen2_5_omni.code2wav import SAMPLE_RATE_HZ, Code2WavSession
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.relied_on import SIGNATURES, THINKER
from omni_cluster.models.qwen2_5_omni.thinker import ROWS
from omni_cluster.models.sound import LinearCost, SoundModel, SoundPriors, SoundSession
from omni_cluster.models.stage_spec import ARSpec, SoundSpec
from omni_cluster.models.thinker_session import ThinkerSession
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

if TYPE_CHECKING:
    import torch

    from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni


class Thinker(ARSpec):
    """Media and text in, text out; a conditioning row a position for the talker."""

    name = "thinker"
    emits = frozenset({"text", "rows"})
    rows_kind = ROWS
    # Trained on the whole model, or on the thinker alone.
    lora_prefixes = dict.fromkeys(("thinker.model.layers.", "model.layers."), "thinker.model.layers.")

    def __init__(self, family: Qwen2_5Omni) -> None:
        self._family = family

    @property
    def traits(self) -> EngineTraits:
        from omni_cluster.models.qwen2_5_omni.thinker_model import thinker_config

        return EngineTraits(thinker_config, relied_on=THINKER, signatures=SIGNATURES, tool_parser="hermes")

    def sizes(self, config: StageConfig) -> ARSizes:
        return memory.thinker_sizes(self._family.folder)

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        return ThinkerSession(request, self._family.tokenize)


class Talker(ARSpec):
    """The thinker's rows in, codes out."""

    name = "talker"
    source = "thinker"
    emits = frozenset({"codes"})
    reads = frozenset({"rows"})

    def __init__(self, family: Qwen2_5Omni) -> None:
        self._family = family

    @property
    def traits(self) -> EngineTraits:
        from omni_cluster.models.qwen2_5_omni.talker_model import talker_config

        return EngineTraits(
            talker_config,
            has_tokenizer=False,
            is_compiled=False,
            is_host_bound=True,
            relied_on=DECODER,
            signatures=SIGNATURES,
        )

    def sizes(self, config: StageConfig) -> ARSizes:
        return memory.talker_sizes(self._family.folder)

    @property
    def vocab_size(self) -> int:
        return self._family.codec_vocab_size

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        from omni_cluster.models.qwen2_5_omni.talker import TalkerSession

        family = self._family
        voice, interval = family.check_voice(request.voice), stream_interval(family.blocks.codes_per_block)
        return TalkerSession(request, upstream, family.ids, family.text_embeddings, voice, interval, hold)


def stream_interval(block: int) -> StreamInterval:
    """How the talker's codes leave it, where code2wav has so many in a block.

    Code2wav's first piece is a block and its look-ahead, of a block at most: none of its codes waits for one behind it.
    Half a block later is soon enough for the others. Behind twelve blocks, 2.9 s, all but a talker that is slower than
    speech is far enough ahead for two blocks.
    """
    return StreamInterval(first=2 * block, then=block // 2, late=2 * block, late_from=12 * block)


class Code2Wav(SoundSpec):
    """Codes in, sound out: a flow over mel frames, and a vocoder."""

    name = "code2wav"
    source = "talker"
    Options = Code2WavOptions
    # Measured on one H200, in bfloat16 and TF32. Sizes are mel frames.
    priors = SoundPriors(
        step=LinearCost(3e-3, 6e-6),
        finish=LinearCost(4e-3, 2.5e-5),
        usual_sizes=(48, 3_072),
        worth_finishing=1_280,
        # A pass of the vocoder waits for the step that runs, takes tens of milliseconds on a card with other stages,
        # and then its sound travels to the client.
        finish_ahead_s=0.15,
        # A newcomer waits for ten, the rest of the one that runs and its own; larger steps do more a second.
        newcomer_steps=4,
        piece_size=72.0,
        # The sound of a first piece, less its way to the client.
        cushion_s=0.15,
    )

    def __init__(self, family: Qwen2_5Omni) -> None:
        self._family = family

    @property
    def sample_rate_hz(self) -> int:
        return SAMPLE_RATE_HZ

    @property
    def samples_per_code(self) -> int:
        return self._family.blocks.samples_per_code

    def sizes(self, config: StageConfig) -> SoundSizes:
        return memory.code2wav_sizes(self._family.folder, cast(Code2WavOptions, self.options(config)))

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk], options: SoundOptions) -> SoundSession:
        family, voice = self._family, self._family.check_voice(request.voice)
        own = cast(Code2WavOptions, options)
        return Code2WavSession(
            request, upstream, family.ids, family.blocks, voice, own.max_piece_blocks, own.look_ahead_codes
        )

    def model(self, device: torch.device, options: SoundOptions, shares_card: bool) -> SoundModel:
        from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel

        own = cast(Code2WavOptions, options)
        return Code2WavModel(self._family.folder, self._family.loaded_voices, device, own, shares_card)
