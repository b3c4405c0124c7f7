"""What the configuration bounds and presets, as the API's modules take it: a bound goes by one name in both."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel

from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.build import BoundPipeline
from omni_cluster.models.registry import family_class
from omni_cluster.openai_api.decoders import DecoderLimits
from omni_cluster.openai_api.fetch import FetchLimits
from omni_cluster.openai_api.limits import ApiDefaults, ApiLimits
from omni_cluster.openai_api.video import VideoLimits

T = TypeVar("T", ApiLimits, FetchLimits, DecoderLimits)


def api_limits(config: PipelineConfig) -> ApiLimits:
    limits = config.limits
    frames = family_class(config.family).frames
    video = VideoLimits(limits.max_video_s, limits.max_video_frames, limits.max_frame_pixels, frames)
    return _taken(ApiLimits, limits, max_audio_s=limits.max_audio_input_s, video=video)


def api_defaults(bound: BoundPipeline) -> ApiDefaults:
    api = bound.config.api
    aliases = {**bound.family.voice_aliases, **api.voice_aliases}
    return ApiDefaults(aliases, tuple(api.default_modalities), bound.sample_rate_hz, bound.family.speaking)


def fetch_limits(config: PipelineConfig) -> FetchLimits:
    hosts = tuple(config.fetch.allowed_hosts)
    return _taken(FetchLimits, config.fetch, max_bytes=config.limits.max_media_bytes, allowed_hosts=hosts)


def decoder_limits(config: PipelineConfig) -> DecoderLimits:
    return _taken(DecoderLimits, config.decoders)


def _taken(kind: type[T], source: BaseModel, **others: Any) -> T:
    """A `kind` of `others`, and of the fields of `source` for all else."""
    return kind(**others, **{each.name: getattr(source, each.name) for each in fields(kind) if each.name not in others})
