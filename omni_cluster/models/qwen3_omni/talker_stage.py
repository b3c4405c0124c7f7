"""The talker as a stage of the pipeline: the thinker's tokens and its rows of media in, codes out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from omni_cluster.config.schema import StageConfig
from omni_cluster.config.traits import EngineTraits
from omni_cluster.memory.sizes import ARSizes, WeightGroup
from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import ARSession, Hold, StreamInterval
from omni_cluster.models.qwen3_omni.code2wav import FIRST_CODES, LATER_CODES
from omni_cluster.models.qwen3_omni.relied_on import SIGNATURES, TALKER
from omni_cluster.models.qwen3_omni.talker import TalkerSession
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.voices import voice_id, voice_ids
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk

CALL_MARK = "<tool_call>"
STREAM_INTERVAL = StreamInterval(sum(FIRST_CODES), LATER_CODES // 2, late=LATER_CODES, late_from=4 * LATER_CODES)
"""Code2wav's first pieces have a code and more; half a piece later is soon enough for the others, and a whole one when
seconds of sound are ahead."""


class OfCheckpoint(Protocol):
    """What is asked of the family."""

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""

    def check_voice(self, voice: str | None) -> str:
        """See `Family.check_voice`."""


class Talker(ARSpec):
    """The thinker's tokens and rows of media in, codes out."""

    name = "talker"
    source = "thinker"
    emits = frozenset({"codes"})
    reads = frozenset({"text", "rows"})
    takes_ids = True
    has_residual_codes = True
    penalises_prompts = False
    codeless_ends = frozenset({"stop", "length"})
    """transformers makes a code's residual ones in the step behind it, which the last of a full length has not."""

    def __init__(self, family: OfCheckpoint) -> None:
        self._family = family

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_config(self._family.folder)

    @cached_property
    def _ids(self) -> TalkerIds:
        return TalkerIds.from_config(self._config)

    @cached_property
    def _voices(self) -> dict[str, int]:
        return voice_ids(self._config)

    @cached_property
    def _call_mark(self) -> int | None:
        mark: int | None = FileTokenizer(self._family.folder).backend_tokenizer.token_to_id(CALL_MARK)
        return mark

    @property
    def traits(self) -> EngineTraits:
        from omni_cluster.models.qwen3_omni.talker_model import talker_config

        return EngineTraits(
            talker_config,
            has_tokenizer=False,
            is_compiled=False,
            is_host_bound=True,
            relied_on=TALKER,
            signatures=SIGNATURES,
        )

    @property
    def vocab_size(self) -> int:
        return int(self._config["talker_config"]["text_config"]["vocab_size"])

    def sizes(self, config: StageConfig) -> ARSizes:
        return talker_sizes(self._config)

    def session(self, request: OmniRequest, upstream: AsyncIterator[StageChunk] | None, hold: Hold) -> ARSession:
        mark = None if request.tool_use is None else self._call_mark
        voice = voice_id(self._voices, self._family.check_voice(request.voice))
        return TalkerSession(request, upstream, self._ids, voice, STREAM_INTERVAL, mark)


def talker_sizes(config: dict[str, Any]) -> ARSizes:
    """Of a checkpoint's config.json. The thinker's embeddings are read, and projected into a table."""
    talker, thinker = config["talker_config"], config["thinker_config"]["text_config"]
    text, predictor = talker["text_config"], talker["code_predictor_config"]
    whole = ("code_predictor.", "text_projection.", "hidden_projection.")
    experts = text["num_experts_per_tok"] * text["moe_intermediate_size"]
    kept_of_request = 2 * predictor["num_hidden_layers"] * predictor["num_key_value_heads"] * predictor["head_dim"]
    return ARSizes(
        weights=(WeightGroup("talker."), *(WeightGroup(f"talker.{name}", split=False) for name in whole)),
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        hidden_size=text["hidden_size"],
        intermediate_size=experts + text["shared_expert_intermediate_size"],
        vocab_size=text["vocab_size"],
        max_positions=text["max_position_embeddings"],
        buffers_size=text["head_dim"],  # angles
        rows_size=talker["thinker_hidden_size"],
        residual_codes=predictor["num_code_groups"] - 1,
        made_elements=thinker["vocab_size"] * text["hidden_size"],
        request_elements=kept_of_request * predictor["num_code_groups"],
    )
