"""From a request of the chat API to one of the pipeline, and from its answer back to the API's shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy as np

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.engine.answer import AnswerProgress
from omni_cluster.engine.build import BoundPipeline, spec_class
from omni_cluster.openai_api.access import VOICE_HEADER, ApiKeys
from omni_cluster.openai_api.audio import Base64Pieces, wav_bytes
from omni_cluster.openai_api.chat import AnswerFormat, ChatRequest, FinishReason
from omni_cluster.openai_api.completion import Usage
from omni_cluster.openai_api.encoding import SoundEncoder, SoundFormat, encode, is_quick
from omni_cluster.openai_api.errors import check_at_most, invalid
from omni_cluster.openai_api.wire import shown
from omni_cluster.types.outputs import AudioChunk, OmniRequestOutput
from omni_cluster.types.sampling import APART, OF_NO_CALL

_LIST = "sampling_params_list"
_BY_NAME = "stage_sampling_params"
_OF_TOKENS = frozenset({"stop_token_ids", "allowed_token_ids", "logit_bias"})
_OF_TEXT = frozenset({"stop", "bad_words", "include_stop_str_in_output"})
_OF_DECODING = frozenset({"skip_special_tokens", "spaces_between_special_tokens"})
"""How text is made of tokens: clients send vLLM's defaults to every stage."""


def api_keys(config: PipelineConfig) -> ApiKeys:
    """Raises ConfigError for a key file that cannot be read, or for what is no key."""
    file = config.api.keys_file
    return ApiKeys.load(Path(file) if file is not None else None, os.environ, config.api.keys_variable)


def stage_sampling(chat: ChatRequest, config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """What each stage that samples is asked for, by its name: what differs from the configuration.

    The client's own fields go to the stage that makes the text, a seed to all; the stage's entry of
    `sampling_params_list` or `stage_sampling_params` wins over both. Raises BadRequest.
    """
    asked = {}
    for stage, (param, given) in zip(config.stages, _entries(chat, config.stages), strict=True):
        spec = spec_class(stage, config)
        if not spec.samples_tokens:
            continue  # clients of vLLM-Omni send an entry for each stage
        taken = _taken(given, stage, spec.most_tokens(config.limits, {}), param)
        asked[stage.model_stage] = _client_fields(chat, stage) | taken
        _check_lengths(asked[stage.model_stage], stage, config, f"{param}." if "min_tokens" in given else "")
        if stage.final_output_type == "text":
            _check_apart(chat.sampling, chat)
            _check_apart(given, chat, f"{param}.")
    return asked


def check_token_ids(chat: ChatRequest, bound: BoundPipeline) -> None:
    """Raises BadRequest for ids that a stage's model has not, before any stage begins."""
    check_text_ids(chat.sampling, bound)
    stages = bound.config.stages
    for stage, (param, given) in zip(stages, _entries(chat, stages), strict=True):
        is_text = stage.final_output_type == "text"
        vocab_size = bound.family.vocab_size if is_text else bound.spec(stage).vocab_size
        if vocab_size is not None:
            _check_ids(given, vocab_size, f"{param}.")


def check_text_ids(asked: Mapping[str, Any], bound: BoundPipeline) -> None:
    """The same for sampling parameters of the text by vLLM's names."""
    _check_ids(asked, bound.family.vocab_size)


def _check_ids(asked: Mapping[str, Any], vocab_size: int, prefix: str = "") -> None:
    """`prefix`: of the fields' paths."""
    for name in _OF_TOKENS & asked.keys():
        if beyond := [i for i in asked[name] if i >= vocab_size]:
            param = f"{prefix}{name}"
            raise invalid(param, f"{param} has the token {beyond[0]}, but the model's are 0 to {vocab_size - 1}.")


def text_sampling(asked: Mapping[str, Any], config: PipelineConfig) -> dict[str, dict[str, Any]]:
    """The same for a request that text alone answers, by vLLM's names. Raises BadRequest."""
    stages = [stage for stage in config.stages if stage.final_output_type == "text"]
    for stage in stages:
        _check_lengths(asked, stage, config)
    return {stage.model_stage: dict(asked) for stage in stages}


def _entries(chat: ChatRequest, stages: Sequence[StageConfig]) -> list[tuple[str, dict[str, Any]]]:
    """What the client sent for each stage, by place or by name, and the path of the field that has it."""
    names = [stage.model_stage for stage in stages]
    unknown = [name for name in chat.named_sampling if name not in names]
    if unknown:
        raise invalid(_BY_NAME, f"{_BY_NAME} has an entry {unknown[0][:40]!r}, but the stages are {', '.join(names)}.")
    if chat.named_sampling:
        by_name = {name: entry.given() for name, entry in chat.named_sampling.items()}
        return [(f"{_BY_NAME}.{name}", by_name.get(name, {})) for name in names]
    entries = chat.stage_sampling or (None,) * len(names)
    if len(entries) != len(names):
        raise invalid(_LIST, f"{_LIST} has {len(entries)} entries, but it should have one a stage: {', '.join(names)}.")
    return [(f"{_LIST}[{i}]", {} if entry is None else entry.given()) for i, entry in enumerate(entries)]


def _client_fields(chat: ChatRequest, stage: StageConfig) -> dict[str, Any]:
    seeded = {} if chat.seed is None else {"seed": chat.seed}
    if stage.final_output_type != "text":
        return seeded
    structure = {} if chat.structure is None else chat.structure.given()
    return seeded | chat.sampling | structure


def _taken(given: Mapping[str, Any], stage: StageConfig, most: int, param: str) -> dict[str, Any]:
    """What of an entry its stage uses. Raises BadRequest for what it cannot do, and for more than `most` tokens."""
    check_at_most(f"{param}.max_tokens", given.get("max_tokens"), most)
    if stage.final_output_type == "text":
        return dict(given)
    for field in _OF_TEXT & given.keys():
        name = f"{param}.{field}"
        raise invalid(name, f"{name} is for stage {stage.model_stage}, which makes no text; leave it out.")
    return {name: value for name, value in given.items() if name not in _OF_DECODING}


def _check_lengths(asked: Mapping[str, Any], stage: StageConfig, config: PipelineConfig, prefix: str = "") -> None:
    """Raises BadRequest for more `min_tokens` than the stage may make by any of its bounds."""
    most = spec_class(stage, config).most_tokens(config.limits, {**stage.default_sampling_params, **asked})
    if "min_tokens" in asked and asked["min_tokens"] > most:
        param = f"{prefix}min_tokens"
        raise invalid(
            param, f"{param} is {asked['min_tokens']}, but it should be at most its max_tokens, which is {most}."
        )


def _check_apart(asked: Mapping[str, Any], chat: ChatRequest, prefix: str = "") -> None:
    """Raises BadRequest for what no text can have that is kept to a structure, and for what would cut a forced call."""
    apart = dict.fromkeys(APART, _keeps_the_text(chat))
    if chat.tool_use is not None and chat.tool_use.must_call:
        apart[OF_NO_CALL] = "tool_choice"
    for name, keeps in apart.items():
        if keeps is not None and asked.get(name):
            param = f"{prefix}{name}"
            raise invalid(
                param, f"{param} is {shown(asked[name])}, but {keeps} says what the text is; leave one of them out."
            )


def _keeps_the_text(chat: ChatRequest) -> str | None:
    """The field by which the text is kept to a structure; None for any text."""
    if chat.structure is not None:
        return chat.structure.param
    if chat.tool_use is not None and chat.tool_use.must_call:
        return "tool_choice"
    return "tools" if any(tool["function"].get("strict") for tool in chat.tools) else None


class StreamedSound:
    """Sound as a streaming client reads it, in pieces.

    Without a format, each piece is a whole WAV file. Otherwise pieces can be joined, their base64 forms too:
    raw 24 kHz mono samples for "pcm16" and, in DashScope's way, for "wav"; one file of the other formats.
    """

    def __init__(self, audio_format: AnswerFormat | None) -> None:
        self._format: SoundFormat | None = "pcm16" if audio_format == "wav" else audio_format
        self._pieces = Base64Pieces()
        self._encoder: SoundEncoder | None = None

    def is_quick(self, audio: AudioChunk) -> bool:
        """Whether `push` takes a millisecond at most."""
        return is_quick(self._format, audio.samples.size)

    def push(self, audio: AudioChunk) -> bytes:
        """Returns what may be sent now. Codecs take up to a tenth of the time that the sound lasts."""
        if self._format is None:
            return wav_bytes(audio.samples, audio.sample_rate_hz)
        if self._encoder is None:
            self._encoder = SoundEncoder(audio.sample_rate_hz, self._format)
        return self._pieces.push(self._encoder.push(audio.samples))

    def flush(self) -> bytes:
        """The rest."""
        rest = b"" if self._encoder is None else self._encoder.finish()
        return self._pieces.push(rest) + self._pieces.flush()

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()


def whole_sound(audio: AudioChunk | None, sound_format: SoundFormat, sample_rate_hz: int) -> bytes:
    """One file; a file without samples, at `sample_rate_hz`, for no sound."""
    if audio is None:
        return encode(np.zeros(0, np.float32), sample_rate_hz, sound_format)
    return encode(audio.samples, audio.sample_rate_hz, sound_format)


def finish_reason(answer: OmniRequestOutput | AnswerProgress) -> FinishReason:
    """OpenAI's word for how the text ended, or that it ended with calls."""
    if answer.makes_calls and answer.finish_reason != "length":
        return "tool_calls"
    return cast(FinishReason, answer.finish_reason or "stop")


def voice_header(voice: str | None) -> dict[str, str]:
    """Says in which voice an answer is spoken: a client's name for it may be an alias."""
    return {VOICE_HEADER: quote(voice)} if voice else {}


def timings(answer: OmniRequestOutput | AnswerProgress) -> dict[str, Any]:
    return {"stages": {name: asdict(times) for name, times in answer.times.items()}}


def usage(answer: OmniRequestOutput | AnswerProgress) -> Usage:
    """Of a whole answer, or of one so far."""
    tokens = answer.counts
    return Usage(tokens.prompt, tokens.text + tokens.codec, tokens.codec, tokens.cached, tokens.prompt_audio)
