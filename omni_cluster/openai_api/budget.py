"""How many bytes all media of one request may have together once they are decoded."""

from __future__ import annotations

from omni_cluster.openai_api.errors import media_too_large


class Budget:
    """Bytes that are left of a request's `max_bytes`. Both methods raise BadRequest (413) that names `param`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._taken_bytes = 0

    def check(self, size_bytes: int, param: str) -> None:
        """Raises if so many could not be taken."""
        if self._taken_bytes + size_bytes > self._max_bytes:
            raise media_too_large(
                param,
                f"The request's media come to {self._taken_bytes + size_bytes} bytes and more when decoded, but at "
                f"most {self._max_bytes} are accepted.",
            )

    def take(self, size_bytes: int, param: str) -> None:
        self.check(size_bytes, param)
        self._taken_bytes += size_bytes
