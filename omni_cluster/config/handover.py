"""What passes from a stage to the stage that it feeds."""

from __future__ import annotations

from pydantic import Field

from omni_cluster.config.problems import Strict


class HandoverConfig(Strict):
    """Which conditioning rows are kept by the stage that makes them."""

    kept_rows_bytes: int = Field(
        default=1_073_741_824,
        ge=0,
        description="Rows of cached prompts that a replica keeps: 1 GiB; 0: requests with sound read no prefix cache.",
        examples=[1_073_741_824],
    )
