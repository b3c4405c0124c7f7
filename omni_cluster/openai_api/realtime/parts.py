"""What the protocol's events and their parts are checked by."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Strict types. Unknown fields are left out: clients send many, some end at the first error, and each change of a
    session is answered with the whole session as it is kept.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)
