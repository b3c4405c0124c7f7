"""What passes from a stage to the stage that it feeds."""

from __future__ import annotations

from pydantic import Field

from omni_cluster.config.problems import Strict


class HandoverConfig(Strict):
    """What a stage keeps of the conditioning rows (hidden states) that it passes to the next one."""

    kept_rows_bytes: int = Field(
        default=1_073_741_824,
        ge=0,
        description="Host memory of each replica for the rows of cached prompts. With it requests with sound read the "
        "prefix cache as far as their rows are kept, and rows of an earlier prompt do not travel again; "
        "with 0 they do neither.",
        examples=[1_073_741_824],
    )
