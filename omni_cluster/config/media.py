"""How the media of requests are fetched and decoded."""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field, field_validator

from omni_cluster.config.problems import Problem, Strict, refuse

_NO_HOST: Final = re.compile(r"|.*[\s/?#@*].*|[^:]*:[^:]*|.*\.", re.DOTALL)
"""Nothing, parts of a URL, a pattern, a port, the root of names; the fetcher refuses what else is no name."""


class FetchConfig(Strict):
    """How media are fetched that a request names by URL; `limits` bounds their sizes."""

    timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds of one fetch, further attempts included.", examples=[10.0]
    )
    max_concurrent: int = Field(default=16, ge=1, description="Fetches of one ingress at once.", examples=[16])
    retries: int = Field(default=2, ge=0, description="Further attempts after a failure that may pass.", examples=[2])
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Hosts that media are fetched from; none: every public one.",
        examples=[["example.com"]],
    )
    allow_private: bool = Field(
        default=False,
        description="Whether addresses that are not public are fetched from too, as in a closed network.",
        examples=[False],
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: list[str]) -> list[str]:
        fix = "it must be a host's whole name alone, for example media.example.org"
        refuse([Problem("", host, fix) for host in hosts if _NO_HOST.fullmatch(host)])
        return hosts


class DecodersConfig(Strict):
    """The processes of an ingress that decode media, and large bodies."""

    processes: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Processes of each ingress; each decodes one request's media at a time.",
        examples=[2],
    )
    memory_bytes: int = Field(
        # A WEBP of the largest size takes 2.7 GiB, a progressive JPEG 1.7, the other kinds of picture 1.2.
        default=3_221_225_472,
        ge=67_108_864,
        description="Memory that one of them may take; a bound, nothing is set aside.",
        examples=[3_221_225_472],
    )
    timeout_s: float = Field(
        default=300.0, gt=0, description="Seconds in which one request's media are decoded.", examples=[300.0]
    )
    max_held_bytes: int = Field(
        default=536_870_912,
        ge=1,
        description="Bytes of decoded media of running requests, above which further media wait to be decoded.",
        examples=[536_870_912],
    )
