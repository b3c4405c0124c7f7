"""How the media of requests are fetched and decoded."""

from __future__ import annotations

from pydantic import Field

from omni_cluster.config.problems import Strict


class FetchConfig(Strict):
    """How media are fetched that a request names by URL; their sizes are `limits`'."""

    timeout_s: float = Field(default=10.0, gt=0, description="One fetch, retries included.", examples=[10.0])
    max_concurrent: int = Field(default=16, ge=1, description="Fetches of an ingress at once.", examples=[16])
    retries: int = Field(default=2, ge=0, description="After a failure that may pass.", examples=[2])
    allowed_hosts: list[str] = Field(
        default_factory=list, description="Hosts to fetch from; none: every public one.", examples=[["example.com"]]
    )
    allow_private: bool = Field(
        default=False, description="Addresses that are not public too, as in a closed network.", examples=[False]
    )


class DecodersConfig(Strict):
    """The processes of an ingress that read media, and bodies that are large."""

    processes: int = Field(default=2, ge=1, le=64, description="Requests that are decoded at once.", examples=[2])
    memory_bytes: int = Field(
        # A WEBP of the largest size takes 2.7 GiB, a progressive JPEG 1.7, the other kinds of picture 1.2.
        default=3_221_225_472,
        ge=67_108_864,
        description="What one may take to decode a request: 3 GiB.",
        examples=[3_221_225_472],
    )
    timeout_s: float = Field(default=300.0, gt=0, description="Decoding of one request's media.", examples=[300.0])
    max_held_bytes: int = Field(
        default=536_870_912,
        ge=1,
        description="Decoded media of running requests above which no further ones are decoded: 512 MiB.",
        examples=[536_870_912],
    )
