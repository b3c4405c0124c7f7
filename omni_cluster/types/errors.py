"""What goes wrong, by kind: every error that a user can cause is an `OmniError` of its own type with one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence


class OmniError(Exception):
    """Base of all errors that `omni_cluster` raises on purpose."""


class ConfigError(OmniError):
    """A stage configuration that cannot run: names the file, the key, the value and a value that would do."""


class AdapterError(ConfigError):
    """A LoRA adapter of the configuration that its stage cannot take: names its key, its folder and what is wrong."""


class PayloadError(OmniError):
    """Embedding or information payload that does not match its own header, or exceeds a limit."""


class RequestError(OmniError):
    """A request that no stage was asked to run: names the field, the value and what is accepted."""


class PromptTooLong(RequestError):
    """A prompt of more tokens than fit: names both figures, in words that clients' libraries look for."""

    @classmethod
    def of(cls, length: str, most: int) -> PromptTooLong:
        """`length`: how many tokens the prompt has, in words."""
        return cls(f"This model's maximum context length is {most} tokens, but the prompt has {length}.")


class GrammarRefused(RequestError):
    """What a text must be is no schema, pattern or grammar that can be followed: says what is wrong with it."""


class StageDied(OmniError):
    """What worked on a request is gone, an engine, a replica or its host: the same request may be sent again.

    `replica_id`: of the replica that was lost, "" if that is not known; pickling and `cluster/wire.py` keep it.
    """

    replica_id: str = ""


class RequestGone(StageDied):
    """A replica has ended a request, or never had it, for a reason that it does not know: it may live."""


DIED = "a stage's replica died; send the request again."
"""A client's message for StageDied."""


class ServerClosing(OmniError):
    """The server ends, and what still runs with it: the same request may be sent again, to another or a later one."""


class StoreFull(OmniError):
    """There is no room for a request's media or rows on their way to the stage that reads them."""


NO_ROOM = "Ray's object store is full and cannot take this request now; send it again later."
"""A client's message for StoreFull."""


class SoundEngineStopped(StageDied):
    """A sound stage was shut down, or broke, while a request waited for it."""


class JobFailed(OmniError):
    """A sound job that failed alone as it did in its batch; the jobs beside it did not."""


class NotFinite(OmniError):
    """Values that a stage computed for one request are infinite or no numbers: the request ends, others go on."""


class TokenError(OmniError):
    """Tokens of one stage that are invalid in the next one: names the token and what would be valid."""


class VersionError(OmniError):
    """A library whose private parts we rely on is not the version that was checked, or is not whole here."""


def kinds_of(error: Exception) -> list[str]:
    """Names of the error's class and of those of ours that it is a kind of: its reader may not have all of them."""
    return [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, OmniError)]


def kind_named(names: Sequence[str]) -> type[OmniError] | None:
    """Ours of the first name that this process has; None if it has none of them."""
    known = {kind.__name__: kind for kind in _kinds(OmniError)}
    return next((known[name] for name in names if name in known), None)


def _kinds(base: type[OmniError]) -> Iterator[type[OmniError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def without_frames(error: BaseException) -> BaseException:
    """The error alone: the frames of it and its causes may hold a request's media until garbage is collected.

    Their locals go too, for Serve keeps the frames of a call that failed, and in them its arguments.
    """
    cause = error.__cause__ or error.__context__
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = error.__traceback__ = None
    if cause is not None:
        without_frames(cause)
    return error
