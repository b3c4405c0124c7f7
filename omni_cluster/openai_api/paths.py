"""What a request that is translated is refused for, by the client's own paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omni_cluster.openai_api.errors import BadRequest


class Paths:
    """Where each field of the translation came from; what is in a field came from there too."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}

    def note(self, path: str, own: str) -> None:
        """`path`: of the translation; `own`: of what the client sent."""
        self._own[path] = own

    def own(self, path: str) -> str:
        """The client's own path of a field, as far as one is known."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._own and (end == len(path) or path[end] in ".["):
                return self._own[path[:end]] + path[end:]
        return path

    @contextmanager
    def translated(self) -> Iterator[None]:
        """A refusal inside names the client's own field, in its sentence too."""
        try:
            yield
        except BadRequest as error:
            if error.param is None:
                raise
            own = self.own(error.param)
            raise BadRequest(
                error.message.replace(error.param, own, 1),
                param=own,
                code=error.code,
                status=error.status,
                retry_after_s=error.retry_after_s,
            ) from None
