"""Keys, origins and ids of requests: ASGI middleware that passes every message on as it comes."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_cluster.openai_api.errors import error_body
from omni_cluster.types.errors import ConfigError

OPEN_PATHS = frozenset({"/health"})
REQUEST_ID_HEADER = "x-request-id"
VOICE_HEADER = "x-omni-voice"
FINISH_HEADER = "x-omni-finish-reason"
IGNORED_HEADER = "x-omni-ignored"
"""Fields of a request that asked for something, and changed nothing."""
KEY_PROTOCOL = "openai-insecure-api-key."
POLICY_VIOLATION = 1008
"""The WebSocket close code of a refusal."""

_REFUSED = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
_GOOD_KEY = re.compile(rb"[!-~]{16,}")
_KEY_RULE = "use at least 16 characters of printable ASCII without spaces"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONNECTIONS = ("http", "websocket")
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class ApiKeys:
    """The keys that a client may send; only their SHA-256 digests are kept. Without any key everything is open."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._digests = tuple({hashlib.sha256(key).digest() for key in keys})

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str], variable: str | None) -> ApiKeys:
        """The keys in `file`, one a line, and in `environment[variable]`, separated by commas; either may be None.

        White space around a key, blank entries and the file's lines that start with # are left out.

        Raises:
            ConfigError: the file cannot be read, the file or the variable has no key, or a key is below 16 characters
                or has others than printable ASCII without spaces; one sentence that names the place and never shows
                the key.
        """
        return cls([*_keys_of_file(file), *_keys_of_variable(environment, variable)])

    def accepts(self, header: str | None) -> bool:
        """Whether an Authorization header, `Bearer KEY`, has one of the keys; with no keys, any header and none do."""
        return not self._digests or bool(self.digest(header))

    def digest(self, header: str | None) -> bytes:
        """What identifies the key of an accepted header; of no bytes for any other header, and without keys.

        So there are no more of them than keys, whatever clients send to paths that need none.
        """
        scheme, _, key = (header or "").partition(" ")
        digest = hashlib.sha256(key.lstrip(" ").encode("utf-8", "surrogatepass")).digest()
        # A list, not a generator: the time must not tell which key was meant.
        is_known = any([hmac.compare_digest(digest, known) for known in self._digests])
        return digest if is_known and scheme.lower() == "bearer" else b""

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"


def _keys_of_file(file: Path | None) -> Iterator[bytes]:
    if file is None:
        return
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: the key file cannot be read ({error.strerror}); use one key a line.") from None
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if not line.strip().startswith(b"#")]
    if not any(entry for _, entry in entries):  # a file that was cut off must not open the server
        raise ConfigError(f"{file}: the key file has no key; put one on a line, or name no file.")
    for number, entry in entries:
        yield from _checked(entry, f"{file}: line {number}")


def _keys_of_variable(environment: Mapping[str, str], variable: str | None) -> Iterator[bytes]:
    if variable is None:
        return
    listed = environment.get(variable, "").encode("utf-8", "surrogatepass")
    entries = [entry.strip() for entry in listed.split(b",")]
    if not any(entries):  # a misspelt name, or a host that lacks it, must not open the server
        raise ConfigError(f"variable {variable} has no key; set it where the server starts, or name no variable.")
    for number, entry in enumerate(entries, 1):
        yield from _checked(entry, f"variable {variable}: key {number}")


def _checked(key: bytes, place: str) -> Iterator[bytes]:
    if key and not _GOOD_KEY.fullmatch(key):
        raise ConfigError(f"{place} is not a key; {_KEY_RULE}.")
    if key:
        yield key


class KeyGuard:
    """Refuses every HTTP request and WebSocket without a key, whatever the app would answer; `open_paths` need none.

    The app finds in `scope["state"]["api_key"]` what identifies the key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._lets_in(scope):
            scope["state"] = {**(scope.get("state") or {}), "api_key": self._keys.digest(_authorization(scope))}
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in (scope.get("extensions") or {}):
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": _REFUSED})
        else:
            await _refusal()(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        return _route_path(scope) in self._open_paths or self._keys.accepts(_authorization(scope))


def _route_path(scope: Scope) -> str:
    """The path as the app's router sees it, character by character: below the prefix that the server mounted it at.

    Never the path of a URL put together from the scope: the client writes that URL's Host.
    """
    path, root = scope["path"], scope.get("root_path", "")
    return path[len(root) :] if f"{path}/".startswith(f"{root}/") else path


def _authorization(scope: Scope) -> str | None:
    """The only Authorization header: of several, a proxy before us may have checked another one.

    A browser's page sets no headers of a WebSocket: there a subprotocol may name the key, as OpenAI's clients send it.
    """
    sent = Headers(scope=scope).getlist("authorization")
    if not sent and scope["type"] == "websocket":
        sent = [f"Bearer {each[len(KEY_PROTOCOL) :]}" for each in _subprotocols(scope) if each.startswith(KEY_PROTOCOL)]
    return sent[0] if len(sent) == 1 else None


def _subprotocols(scope: Scope) -> Sequence[str]:
    named: Sequence[str] = scope.get("subprotocols") or ()
    return named


def _refusal() -> JSONResponse:
    body = error_body(_REFUSED, status=401, code="invalid_api_key")
    return JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})


class RequestId:
    """Gives every HTTP request and WebSocket an id: in `scope["state"]["request_id"]` and in the answer's header.

    The id is the client's if that is 1 to 128 of A-Z a-z 0-9 . _ - and a new one if not. A WebSocket that is closed
    before it was accepted has no header to carry it. `answers`: False for a server that adds the header itself.
    """

    def __init__(self, app: ASGIApp, header: str = REQUEST_ID_HEADER, *, answers: bool = True) -> None:
        self._app = app
        self._header = header
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _CONNECTIONS:
            await self._app(scope, receive, send)
            return
        request_id = self._id_of(scope)

        async def send_with_id(message: Message) -> None:
            is_start = self._answers and message["type"] in _STARTS
            await send(_with_header(message, self._header, request_id) if is_start else message)

        # A new state: a server may share one among its requests.
        scope["state"] = {**(scope.get("state") or {}), "request_id": request_id}
        await self._app(scope, receive, send_with_id)

    def _id_of(self, scope: Scope) -> str:
        sent = Headers(scope=scope).get(self._header, "")
        return sent if _GOOD_ID.fullmatch(sent) else uuid.uuid4().hex


def _with_header(message: Message, name: str, value: str) -> Message:
    headers = MutableHeaders(raw=list(message.get("headers", ())))
    headers[name] = value
    return {**message, "headers": headers.raw}


def cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets web pages of `origins` call the app, each such as `https://app.example`, or all with `*`; none: the app.

    Never with credentials: a page sends its key in a header of its own, and a browser adds no cookies to it.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=tuple(origins),
        allow_methods=("GET", "POST"),
        # OpenAI's JavaScript client sends a dozen x-stainless-* headers, and others with each release.
        allow_headers=("*",),
        expose_headers=(REQUEST_ID_HEADER, VOICE_HEADER, FINISH_HEADER, IGNORED_HEADER, "Retry-After"),
    )


def guarded(
    app: ASGIApp,
    *,
    keys: ApiKeys,
    origins: Sequence[str],
    answers_id: bool = True,
    open_paths: Collection[str] = OPEN_PATHS,
) -> ASGIApp:
    """The app behind all of this module; RequestId sees a request first, then CORS, then KeyGuard.

    RequestId is outermost, so that refusals have an id too. CORS comes before the guard: a browser's preflight carries
    no key and is answered there, and a page may read the guard's 401. Wrap a finished FastAPI app from outside rather
    than with `add_middleware`, which leaves the app's own answers to unexpected errors without id and CORS headers.
    """
    return RequestId(cors(KeyGuard(app, keys, open_paths), origins), answers=answers_id)
