"""From a request of the chat API to one of the pipeline, and from its answer back to the API's shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from ray.exceptions import RayActorError

from omni_cluster.cluster.transport import ReplicaLost
from omni_cluster.config.schema import Limits, PipelineConfig, StageConfig
from omni_cluster.engine.fan_in import DeadlineExceeded
from omni_cluster.errors import OmniError, RequestError
from omni_cluster.openai_api.audio import Base64Pieces, pcm16, wav_bytes
from omni_cluster.openai_api.chat import ApiLimits, ChatRequest, FinishReason
from omni_cluster.openai_api.errors import BadRequest, error_body
from omni_cluster.outputs import OmniRequestOutput, Pcm

logger = logging.getLogger("ray.serve")

_LIST = "sampling_params_list"


def api_limits(config: PipelineConfig) -> ApiLimits:
    limits = config.limits
    return ApiLimits(
        max_body_bytes=limits.max_body_bytes,
        max_audio_parts=limits.max_audio_parts,
        max_image_parts=limits.max_image_parts,
        max_media_bytes=limits.max_media_bytes,
        max_audio_s=limits.max_audio_input_s,
        max_image_pixels=limits.max_image_pixels,
        max_output_tokens=limits.max_output_tokens,
    )


def stage_sampling(chat: ChatRequest, config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """What each stage that samples is asked for, by its name: what differs from the configuration.

    The client's own fields go to the stage that makes the text, a seed to all; the stage's entry of
    `sampling_params_list` wins over both. Raises BadRequest.
    """
    entries = chat.stage_sampling or (None,) * len(config.stages)
    if len(entries) != len(config.stages):
        stages = ", ".join(s.model_stage for s in config.stages)
        raise _bad(_LIST, f"{_LIST} has {len(entries)} entries, but it should have one a stage: {stages}.")
    asked = {}
    for number, (stage, entry) in enumerate(zip(config.stages, entries, strict=True)):
        given = {} if entry is None else entry.given()
        _check_given(given, stage, config.limits, f"{_LIST}[{number}]")
        if stage.diffusion is None:
            asked[stage.model_stage] = _client_fields(chat, stage) | given
            _check_lengths(asked[stage.model_stage], stage, config.limits)
    return asked


def _client_fields(chat: ChatRequest, stage: StageConfig) -> dict[str, Any]:
    seeded = {} if chat.seed is None else {"seed": chat.seed}
    if stage.final_output_type != "text":
        return seeded
    fields = {name: value for name, value in asdict(chat.sampling).items() if value not in (None, ())}
    return seeded | fields | ({"stop": list(chat.sampling.stop)} if chat.sampling.stop else {})


def _check_given(given: Mapping[str, Any], stage: StageConfig, limits: Limits, param: str) -> None:
    """Raises BadRequest for an entry that its stage has no use for, or that asks for more than is accepted."""
    if stage.diffusion is not None and given:
        raise _bad(param, f"{param} is for stage {stage.model_stage}, which samples no tokens; send null there.")
    if "stop" in given and stage.final_output_type != "text":
        name = f"{param}.stop"
        raise _bad(name, f"{name} is for stage {stage.model_stage}, which makes no text; leave it out.")
    most = _most_tokens(stage, limits)
    if given.get("max_tokens", 0) > most:
        name = f"{param}.max_tokens"
        raise _bad(name, f"{name} is {given['max_tokens']}, but at most {most} are accepted.")


def _check_lengths(asked: Mapping[str, Any], stage: StageConfig, limits: Limits) -> None:
    """Raises BadRequest for more `min_tokens` than the stage may make, whoever bounds it."""
    chosen = dict(stage.default_sampling_params) | dict(asked)
    most = min(chosen.get("max_tokens") or _most_tokens(stage, limits), _most_tokens(stage, limits))
    if "min_tokens" in asked and asked["min_tokens"] > most:
        raise _bad(
            "min_tokens",
            f"min_tokens of stage {stage.model_stage} is {asked['min_tokens']}, "
            f"but it should be at most its max_tokens, which is {most}.",
        )


def _most_tokens(stage: StageConfig, limits: Limits) -> int:
    return limits.max_output_tokens if stage.final_output_type == "text" else limits.max_codec_tokens


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="invalid_value")


class StreamedSound:
    """Sound as a streaming client reads it.

    No format asked for: each chunk a whole WAV file. "pcm16", and "wav" in DashScope's way: raw 24 kHz mono samples,
    in pieces whose base64 forms can be joined and decoded at once.
    """

    def __init__(self, audio_format: str | None) -> None:
        self._pieces = Base64Pieces() if audio_format is not None else None

    def push(self, pcm: Pcm) -> bytes:
        if self._pieces is None:
            return wav_bytes(pcm.samples, pcm.sample_rate_hz)
        return self._pieces.push(pcm16(pcm.samples))

    def flush(self) -> bytes:
        return b"" if self._pieces is None else self._pieces.flush()


def whole_audio(chat: ChatRequest, pcm: Pcm | None) -> bytes:
    """The answer's sound in the format asked for; WAV when none was. Nothing to say is an empty file of its format."""
    if pcm is None:
        return b""
    return pcm16(pcm.samples) if chat.audio_format == "pcm16" else wav_bytes(pcm.samples, pcm.sample_rate_hz)


def finish_reason(output: OmniRequestOutput) -> FinishReason:
    return cast(FinishReason, output.finish_reason or "stop")


def timings(output: OmniRequestOutput) -> dict[str, Any]:
    return {"stages": {name: asdict(times) for name, times in output.times.items()}}


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error; what is not the client's doing is logged."""
    if isinstance(error, BadRequest):
        return error.status, error.body()
    if isinstance(error, RequestError):
        return 400, error_body(str(error))
    logger.exception("a request failed")
    if isinstance(error, DeadlineExceeded):
        return 504, error_body(str(error), status=504, code="deadline_exceeded")
    if isinstance(error, (RayActorError, ReplicaLost)):
        return 503, error_body("a stage's replica died; send the request again.", status=503, code="stage_died")
    message = str(error) if isinstance(error, OmniError) else "the server failed; its log has the cause."
    return 500, error_body(message, status=500, code="server_error")
