"""What ends a batch, and what ends a row alone."""

from __future__ import annotations

from omni_cluster.types.errors import OmniError, RequestError


class BatchError(OmniError):
    """A batch that cannot go on: one sentence. Rows that were written stay finished."""


class ApplicationLost(BatchError):
    """The application, or the engines, took no request for as long as a row may wait. The row is not finished."""


class BadRow(RequestError):
    """A row that no request can be made of. It becomes its answer's error, and the batch goes on."""

    def __init__(self, message: str, code: str = "bad_row") -> None:
        super().__init__(message)
        self.code = code
