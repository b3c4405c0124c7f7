"""What passes from a stage to the stage that it feeds."""

from __future__ import annotations

from pydantic import Field

from omni_cluster.config.problems import Strict


class HandoverConfig(Strict):
    """What a stage keeps of the hidden states that it sends to the next one."""

    kept_rows_bytes: int = Field(
        default=1_073_741_824,
        ge=0,
        description="Host memory of each replica for the hidden states of cached prompts. Requests with audio read the "
        "prefix cache as far as their hidden states are kept, and those of an earlier prompt are not sent again; "
        "0: neither.",
        examples=[1_073_741_824],
    )
