"""What the configuration bounds is what the API's modules are given."""

from __future__ import annotations

from dataclasses import fields

from omni_cluster.config.limits import Limits
from omni_cluster.config.loader import load_config
from omni_cluster.config.media import DecodersConfig, FetchConfig
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.registry import known_families
from omni_cluster.openai_api.decoders import DecoderLimits
from omni_cluster.openai_api.video import VideoLimits
from omni_cluster.server.limits import api_limits, decoder_limits, fetch_limits
from tests.configs import TINY_CONFIG

CONFIG = load_config(TINY_CONFIG, known_families=known_families()).model_copy(
    update={
        "limits": Limits(
            max_audio_parts=11,
            max_image_parts=12,
            max_video_parts=13,
            max_media_bytes=14,
            max_audio_input_s=15.0,
            max_image_pixels=16,
            max_decoded_bytes=17,
            max_output_tokens=18,
            max_body_bytes=19,
            max_prompt_tokens=20,
            max_video_s=21.0,
            max_video_frames=22,
            max_frame_pixels=23,
            max_choices=24,
        ),
        "fetch": FetchConfig(
            timeout_s=1.5, max_concurrent=2, retries=3, allowed_hosts=["a.example"], allow_private=True
        ),
        "decoders": DecodersConfig(processes=4, memory_bytes=1 << 30, timeout_s=5.0, max_held_bytes=6),
    }
)


def test_each_bound_of_a_request_is_the_configuration_s() -> None:
    given = api_limits(CONFIG)
    by_name = {each.name: getattr(given, each.name) for each in fields(given)}
    assert by_name.pop("video") == VideoLimits(21.0, 22, 23, Qwen2_5Omni.frames)
    assert by_name.pop("max_audio_s") == 15.0
    assert by_name == {name: getattr(CONFIG.limits, name) for name in by_name}
    assert sorted(by_name.values()) == [11, 12, 13, 14, 16, 17, 18, 19, 20, 24]


def test_fetching_and_decoding_are_bounded_as_configured() -> None:
    fetch = fetch_limits(CONFIG)
    assert (fetch.max_bytes, fetch.timeout_s, fetch.max_concurrent, fetch.retries) == (14, 1.5, 2, 3)
    assert (fetch.allowed_hosts, fetch.allow_private) == (("a.example",), True)
    assert decoder_limits(CONFIG) == DecoderLimits(processes=4, memory_bytes=1 << 30, timeout_s=5.0, max_held_bytes=6)
