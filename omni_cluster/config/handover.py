"""What passes from a stage to the stage that it feeds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_cluster.config.problems import Strict


class HandoverConfig(Strict):
    """How conditioning rows travel from a producing replica to its consumer, and which of them are kept."""

    rows: Literal["object", "inline"] = Field(
        default="object",
        description="object: as Ray objects, by reference; inline: beside the tokens, on the replicas' own connection.",
        examples=["object"],
    )
    kept_rows_bytes: int = Field(
        default=1_073_741_824,
        ge=0,
        description="Rows of cached prompts that a replica keeps: 1 GiB; 0: requests with sound read no prefix cache.",
        examples=[1_073_741_824],
    )
