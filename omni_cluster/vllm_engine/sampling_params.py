"""The sampling parameters of a stage's requests, as vLLM takes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind

from omni_cluster.config.limits import Limits
from omni_cluster.config.schema import StageConfig
from omni_cluster.models.stage_spec import ARSpec
from omni_cluster.types.errors import GrammarRefused, RequestError
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.sampling import LEAST_TOP_P, OF_NO_CALL, STRUCTURE, check_sampling
from omni_cluster.vllm_engine.grammar import INVALID, with_grammar
from omni_cluster.vllm_engine.tool_calls import structure_with_calls

logger = logging.getLogger(__name__)


class StageSampling:
    """What the checkpoint says, then the configuration, then the client, then what the family insists on."""

    def __init__(self, stage: StageConfig, limits: Limits, spec: ARSpec, model: ModelConfig) -> None:
        self._stage = stage
        self._limits, self._spec = limits, spec
        self._tool_parser = spec.traits.tool_parser
        self._of_checkpoint: Mapping[str, Any] = model.get_diff_sampling_param()
        self._vocab_size = model.get_vocab_size()

    def params(self, request: OmniRequest, forced: Mapping[str, Any]) -> SamplingParams:
        """Raises RequestError for what the stage cannot sample by."""
        name = self._stage.model_stage
        asked = request.sampling.get(name, {})
        chosen = {**self._of_checkpoint, **self._stage.default_sampling_params, **asked, **forced}
        check_sampling(chosen, name)
        chosen[STRUCTURE] = self._structure(request, chosen.get(STRUCTURE))
        self._check_no_cut(request, chosen)
        chosen["max_tokens"] = self._spec.most_tokens(self._limits, chosen)
        self._check_least_tokens(chosen)
        if chosen.get("seed") is not None:
            chosen["seed"] %= 2**64  # vLLM takes -1 for none
        if chosen.get("top_p") is not None:
            chosen["top_p"] = max(chosen["top_p"], LEAST_TOP_P)
        try:
            params = SamplingParams(**with_grammar(chosen, name), output_kind=RequestOutputKind.DELTA)
        except (ValueError, TypeError, VLLMClientError) as error:
            raise refused(name, error) from error
        self._check_token_ids(params)
        return params

    def _structure(self, request: OmniRequest, structure: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What the stage's text is kept to: calls of tools too, where the request may make some."""
        if request.tool_use is None or not self._tool_parser:
            return structure
        try:
            return structure_with_calls(self._tool_parser, request.tool_use, structure)
        except (ValueError, TypeError, KeyError) as error:
            raise GrammarRefused(INVALID) from error

    def _check_no_cut(self, request: OmniRequest, chosen: Mapping[str, Any]) -> None:
        """Raises RequestError for what would cut a call that the request forces."""
        is_forced = self._tool_parser and request.tool_use is not None and request.tool_use.must_call
        if is_forced and chosen.get(OF_NO_CALL):
            raise RequestError(
                f"{OF_NO_CALL} of stage {self._stage.model_stage} would cut the call that is asked for; leave it out."
            )

    def _check_least_tokens(self, chosen: Mapping[str, Any]) -> None:
        """Raises RequestError for more tokens at least than the request may have at most."""
        least, most = chosen.get("min_tokens") or 0, chosen["max_tokens"]
        if least > most:
            raise RequestError(
                f"min_tokens of stage {self._stage.model_stage} is {least}, "
                f"but it should be at most the stage's max_tokens, {most}."
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        """Raises RequestError for ids that the stage's model has not: vLLM would refuse them when others have begun."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            beyond = [i for i in getattr(params, name) or () if not 0 <= i < self._vocab_size]
            if beyond:
                raise RequestError(
                    f"{name} of stage {self._stage.model_stage} has {beyond[0]}, "
                    f"but the model's tokens are 0 to {self._vocab_size - 1}."
                )


def refused(stage: str, error: Exception) -> RequestError:
    """vLLM's own words are for the log: they name what clients do not know."""
    logger.warning("stage %s refused sampling parameters: %s", stage, error)
    return RequestError(f"sampling parameters of stage {stage} do not go together; leave some of them out.")
