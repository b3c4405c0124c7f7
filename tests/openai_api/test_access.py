from __future__ import annotations

import asyncio
import contextlib
import hmac
import pickle
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from omni_cluster.openai_api.access import ApiKeys, KeyGuard, RequestId, cors, guarded
from omni_cluster.types.errors import ConfigError

FIRST, SECOND, THIRD = "sk-first-0123456789", "sk-second-0123456789", "sk-third-0123456789"
KEYS = ApiKeys([FIRST.encode(), SECOND.encode(), THIRD.encode()])
WITH_KEY = {"Authorization": f"Bearer {SECOND}"}
PAGE = "https://app.example"
MADE_ID = re.compile(r"[0-9a-f]{32}")
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}


class Seen:
    """What reached the app behind the guard."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        await PlainTextResponse("inside")(scope, receive, send)


def chat_app() -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        app.state.life = ["up"]
        yield {"engine": "warm"}
        app.state.life.append("down")

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> str:
        return "well"

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        return {"id": request.state.request_id, "engine": getattr(request.state, "engine", None)}

    @app.get("/v1/fail")
    async def fail() -> None:
        raise ValueError("unexpected")

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(socket.state.request_id)
        await socket.close()

    return app


def client(app: ASGIApp, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://api.example", headers=headers)


async def sent_by(app: ASGIApp, scope: Scope) -> list[Message]:
    """All that the app sends for a bare scope, as no server would change it."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def http_scope(path: str, root_path: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Scope:
    return {"type": "http", "method": "GET", "path": path, "root_path": root_path, "headers": list(headers)}


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """A real server of the app: its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the backlog keeps who comes before the server
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def status_of(port: int, target: str, *lines: str, host: str = "api.example") -> int:
    """The status of a GET whose target no client has normalized."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = [f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *lines]
    writer.write("\r\n".join([*head, "", ""]).encode("latin-1"))
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


# ------------------------------------------------------------------ ApiKeys

HEADERS: list[tuple[str | None, bool]] = [
    (f"Bearer {FIRST}", True),
    (f"Bearer {SECOND}", True),
    (f"Bearer {THIRD}", True),
    (f"bearer {FIRST}", True),
    (f"BEARER {FIRST}", True),
    (f"Bearer   {FIRST}", True),
    (None, False),
    ("", False),
    (" ", False),
    ("Bearer", False),
    ("Bearer ", False),
    (FIRST, False),
    (f"Bearer{FIRST}", False),
    (f"Bearer\t{FIRST}", False),
    (f" Bearer {FIRST}", False),
    (f"Basic {FIRST}", False),
    (f"Token {FIRST}", False),
    (f"Bearer {FIRST[:-1]}", False),
    (f"Bearer {FIRST}x", False),
    (f"Bearer {FIRST.upper()}", False),
    (f"Bearer {FIRST} {SECOND}", False),
    (f"Bearer {FIRST},{SECOND}", False),
    (f"Bearer {FIRST}, Bearer {SECOND}", False),
    (f"Bearer Bearer {FIRST}", False),
    (f'Bearer "{FIRST}"', False),
    (f"Bearer {FIRST}\x00", False),
    (f"Bearer {FIRST}\xa0", False),
    (f"Bearer {'x' * 100_000}", False),
]


@pytest.mark.parametrize(("header", "good"), HEADERS)
async def test_a_header_is_accepted_or_answered_401(header: str | None, good: bool) -> None:
    assert KEYS.accepts(header) is good
    async with client(guarded(chat_app(), keys=KEYS, origins=[])) as api:
        headers = {} if header is None else {b"authorization": header.encode("latin-1")}
        answer = await api.get("/v1/models", headers=headers)
    assert answer.status_code == (200 if good else 401)


@pytest.mark.parametrize("header", ["Bearer \ud800", "Bearer é" * 10, "Bearer ключ-ключ-ключ-ключ"])
def test_a_header_that_no_server_would_pass_on_is_refused(header: str) -> None:
    assert not KEYS.accepts(header)


@pytest.mark.parametrize("header", [None, "", "Bearer anything", "Basic eDp5"])
async def test_without_keys_everything_is_open(header: str | None) -> None:
    keys = ApiKeys.load(None, {"OTHER": FIRST}, None)
    assert len(keys) == 0 and keys.accepts(header)
    async with client(guarded(chat_app(), keys=keys, origins=[])) as api:
        answer = await api.get("/v1/models", headers={} if header is None else {"Authorization": header})
    assert answer.status_code == 200


@pytest.mark.parametrize("sent", [FIRST, SECOND, THIRD, "sk-of-nobody-0123456789"])
def test_every_key_is_compared_whichever_was_sent(monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    compared: list[bytes] = []
    compare_digest = hmac.compare_digest

    def counted(sent_digest: bytes, known: bytes) -> bool:
        compared.append(known)
        return compare_digest(sent_digest, known)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert KEYS.accepts(f"Bearer {sent}") is (sent in (FIRST, SECOND, THIRD))
    assert len(compared) == len(set(compared)) == 3


@pytest.mark.parametrize(("header", "good"), HEADERS)
def test_only_an_accepted_header_has_a_digest(header: str | None, good: bool) -> None:
    assert bool(KEYS.digest(header)) is good
    assert ApiKeys().digest(header) == b""


def test_keys_come_from_the_file_and_from_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"# ours: kept in 1 place — é\r\n\r\n  {FIRST}\t\r\n   # {THIRD}\n\n{SECOND}".encode())
    file.chmod(0o644)
    keys = ApiKeys.load(file, {"API_KEYS": " sk-from-variable-1 ,, sk-from-variable-2,"}, "API_KEYS")
    for key in (FIRST, SECOND, "sk-from-variable-1", "sk-from-variable-2"):
        assert keys.accepts(f"Bearer {key}")
    for key in (THIRD, f"# {THIRD}", "sk-from-variable-1 ,, sk-from-variable-2", ""):
        assert not keys.accepts(f"Bearer {key}")
    assert len(keys) == 4


def test_a_key_that_is_named_twice_is_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{FIRST}\n{FIRST}\n")
    assert len(ApiKeys.load(tmp_path / "keys", {"API_KEYS": FIRST}, "API_KEYS")) == 1


def test_the_variable_is_read_only_if_it_is_named() -> None:
    assert len(ApiKeys.load(None, {"API_KEYS": FIRST}, None)) == 0


def test_a_comma_is_part_of_a_key_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{FIRST},{SECOND}\n")
    assert ApiKeys.load(tmp_path / "keys", {}, None).accepts(f"Bearer {FIRST},{SECOND}")


BAD_KEYS = {
    "short": b"fifteen-letters",
    "with a space": b"sk-first 0123456789",
    "with a tab": b"sk-first\t0123456789",
    "with a null": b"sk-first\x000123456789",
    "with a delete": b"sk-first\x7f0123456789",
    "not ASCII": "sk-schlüssel-0123456789".encode(),
    "not UTF-8": b"sk-first-\xff-0123456789",
    "ended by carriage returns": b"sk-first-0123456789\rsk-second-0123456789",
    "with a remark": b"sk-first-0123456789 # ours",
}


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_a_bad_key_in_the_file_is_refused_by_its_line(tmp_path: Path, key: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# ours\n\n" + SECOND.encode() + b"\n" + key + b"\n")
    with pytest.raises(ConfigError) as refused:
        ApiKeys.load(file, {}, None)
    rule = "use at least 16 characters of printable ASCII without spaces"
    assert str(refused.value) == f"{file}: line 4 is not a key; {rule}."


@pytest.mark.parametrize("key", ["fifteen-letters", "sk-first 0123456789", "sk-first-0123456789\nx", "sk-\udcff" * 9])
def test_a_bad_key_in_the_variable_is_refused_by_its_place(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^variable API_KEYS: key 2 is not a key; [^;]*\.$") as refused:
        ApiKeys.load(None, {"API_KEYS": f"{SECOND},{key}"}, "API_KEYS")
    assert key not in str(refused.value)


def test_a_key_of_sixteen_characters_will_do() -> None:
    assert ApiKeys.load(None, {"API_KEYS": "!~#$%&'()*+-./:;"}, "API_KEYS").accepts("Bearer !~#$%&'()*+-./:;")


@pytest.mark.parametrize(("name", "why"), [("missing", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, why: str) -> None:
    file = tmp_path / name
    with pytest.raises(ConfigError) as refused:
        ApiKeys.load(file, {"API_KEYS": FIRST}, "API_KEYS")
    assert str(refused.value) == f"{file}: the key file cannot be read ({why}); use one key a line."


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# keys\n  \n"])
def test_a_file_without_a_key_does_not_open_everything(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"keys: the key file has no key; put one on a line"):
        ApiKeys.load(file, {"API_KEYS": FIRST}, "API_KEYS")


@pytest.mark.parametrize("environment", [{}, {"API_KEYS": ""}, {"API_KEYS": " , ,"}, {"API_KEY": FIRST}])
def test_a_variable_without_a_key_does_not_open_everything(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{FIRST}\n")
    for file in (None, tmp_path / "keys"):
        with pytest.raises(ConfigError, match=r"^variable API_KEYS has no key; set it where the server starts"):
            ApiKeys.load(file, environment, "API_KEYS")


def test_no_key_is_kept_or_shown() -> None:
    assert repr(KEYS) == str(KEYS) == "ApiKeys(3 keys)"
    for kept in (repr(vars(KEYS)).encode(), pickle.dumps(KEYS)):
        assert FIRST.encode() not in kept
    assert pickle.loads(pickle.dumps(KEYS)).accepts(f"Bearer {FIRST}")


# ----------------------------------------------------------------- KeyGuard

CLOSED_PATHS = [
    "/",
    "//",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/models?path=/health",
    "/v1/models?/../health",
    "/openapi.json",
    "/docs",
    "/metrics",
    "/health/",
    "//health",
    "/health//",
    "/./health",
    "/health/.",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health%2f..",
    "/health%2f..%2fv1%2fmodels",
    "/health%252f..",
    "/%2fhealth",
    "/health%2f",
    "/v1/../health",
    "/v1/models/%2e%2e/%2e%2e/health",
    "/Health",
    "/HEALTH",
    "/healthz",
    "/health.json",
    "/health;v1",
    "/health%3fx",
    "/health%23x",
    "/health%00",
    "/health%20",
    "/health%0a",
    "/health%5c..%5cv1",
    "/%ef%bc%8fhealth",
    "/heal%C5%A5h",
]
OPEN_PATHS = ["/health", "/health?", "/health?x=1", "/health?/v1/models", "/%68ealth", "/%68%65%61%6c%74%68"]


async def test_only_the_open_path_itself_needs_no_key() -> None:
    seen = Seen()
    async with serving(KeyGuard(seen, KEYS)) as port:
        closed = {target: await status_of(port, target) for target in CLOSED_PATHS}
        assert closed == dict.fromkeys(CLOSED_PATHS, 401)
        assert [scope["path"] for scope in seen.scopes if scope["type"] == "http"] == []
        opened = {target: await status_of(port, target) for target in OPEN_PATHS}
        assert opened == dict.fromkeys(OPEN_PATHS, 200)
        keyed = [await status_of(port, target, f"Authorization: Bearer {FIRST}") for target in CLOSED_PATHS]
        assert set(keyed) == {200}


@pytest.mark.parametrize("host", ["api.example/health?", "/health?", "x/health#", "api.example:80/health;"])
async def test_the_host_that_a_client_writes_opens_nothing(host: str) -> None:
    headers = ((b"host", host.encode()), (b"x-forwarded-prefix", b"/v1"), (b"x-original-url", b"/health"))
    seen = Seen()
    sent = await sent_by(KeyGuard(seen, KEYS), http_scope("/v1/models", headers=headers))
    assert sent[0]["status"] == 401 and not seen.scopes


@settings(max_examples=300, deadline=None)
@given(
    path=st.lists(st.sampled_from(["/", "/health", "health", "/omni", "omni", "..", "/.", "/v1"]), max_size=5),
    root=st.sampled_from(["", "/", "/omni", "/omni/", "/health", "omni", "/omni/v1"]),
)
async def test_what_is_open_is_what_the_router_takes_for_it(path: list[str], root: str) -> None:
    async def health(request: Request) -> PlainTextResponse:
        return PlainTextResponse("health")

    async def other(request: Request) -> PlainTextResponse:
        return PlainTextResponse("other")

    app = Starlette(routes=[Route("/health", health), Route("/{rest:path}", other)])
    scope = http_scope("".join(path), root)
    routed = await sent_by(app, dict(scope))
    guarded_answer = await sent_by(KeyGuard(app, KEYS), dict(scope))
    assert (guarded_answer[0]["status"] != 401) is (routed[1]["body"] == b"health")


async def test_the_open_path_below_a_prefix_is_open() -> None:
    sent = await sent_by(KeyGuard(Seen(), KEYS), http_scope("/omni/health", "/omni"))
    assert sent[0]["status"] == 200


async def test_the_open_paths_are_the_ones_that_are_given() -> None:
    guard = KeyGuard(Seen(), KEYS, open_paths={"/ready"})
    assert [(await sent_by(guard, http_scope(path)))[0]["status"] for path in ("/ready", "/health")] == [200, 401]


async def test_the_refusal_has_the_shape_of_openai() -> None:
    async with client(KeyGuard(chat_app(), KEYS)) as api:
        answer = await api.post("/v1/chat/completions", headers={"Authorization": "Bearer sk-wrong-0123456789"})
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert {name: error[name] for name in ("type", "param", "code")} == {
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert "sk-wrong" not in answer.text and "sk-first" not in answer.text


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
async def test_every_method_needs_a_key(method: str) -> None:
    async with client(guarded(Seen(), keys=KEYS, origins=[PAGE])) as api:
        assert (await api.request(method, "/v1/models")).status_code == 401
        assert (await api.request(method, "/v1/models", headers=WITH_KEY)).status_code == 200


@pytest.mark.parametrize("keys", [(FIRST, SECOND), (FIRST, FIRST), (FIRST, "wrong"), ("wrong", FIRST)])
async def test_two_authorization_headers_are_none(keys: tuple[str, str]) -> None:
    async with client(KeyGuard(Seen(), KEYS)) as api:
        headers = [("Authorization", f"Bearer {key}") for key in keys]
        assert (await api.get("/v1/models", headers=headers)).status_code == 401


async def test_a_key_elsewhere_than_in_the_header_is_none() -> None:
    async with client(KeyGuard(Seen(), KEYS)) as api:
        api.cookies.set("Authorization", f"Bearer {FIRST}")
        answer = await api.get(
            "/v1/models",
            params={"api_key": FIRST, "authorization": f"Bearer {FIRST}"},
            headers={"X-Api-Key": FIRST, "Proxy-Authorization": f"Bearer {FIRST}"},
        )
    assert answer.status_code == 401


async def test_the_pieces_of_a_stream_pass_one_by_one() -> None:
    read = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            await read.wait()
            yield b"two"

        await StreamingResponse(pieces())(scope, receive, send)

    async with serving(guarded(app, keys=KEYS, origins=[PAGE])) as port, httpx.AsyncClient() as api:
        url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", WITH_KEY | {"Origin": PAGE}
        async with asyncio.timeout(60), api.stream("POST", url, headers=headers) as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"one"
            read.set()
            assert await anext(pieces) == b"two"


async def test_the_body_of_a_request_is_read_by_the_app_alone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        await PlainTextResponse(body)(scope, receive, send)

    async with client(guarded(app, keys=KEYS, origins=[PAGE]), **WITH_KEY) as api:
        assert (await api.post("/v1/chat/completions", content=b"x" * 100_000)).content == b"x" * 100_000


# --------------------------------------------------------------- WebSockets


def without_denials(app: ASGIApp) -> ASGIApp:
    """The app under a server that cannot answer a handshake with an HTTP response."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "extensions": None}, receive, send)

    return served


def test_a_websocket_with_a_key_is_accepted_and_told_its_id() -> None:
    api = TestClient(guarded(chat_app(), keys=KEYS, origins=[PAGE]))
    with api.websocket_connect("/v1/realtime", headers=WITH_KEY | {"X-Request-Id": "mine"}) as session:
        assert session.receive_text() == "mine"
        assert (b"x-request-id", b"mine") in session.extra_headers


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong-0123456789"}, {"Origin": PAGE}])
@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/realtime?api_key=" + FIRST, "/health/", "//health", "/"])
def test_a_websocket_without_a_key_is_denied(path: str, headers: dict[str, str]) -> None:
    seen = Seen()
    api = TestClient(guarded(seen, keys=KEYS, origins=[PAGE]))
    with pytest.raises(WebSocketDenialResponse) as denied, api.websocket_connect(path, headers=headers):
        pass
    assert denied.value.status_code == 401
    assert denied.value.json()["error"]["code"] == "invalid_api_key"
    assert MADE_ID.fullmatch(denied.value.headers["x-request-id"])
    assert not seen.scopes


def test_a_websocket_is_closed_where_the_server_cannot_deny() -> None:
    seen = Seen()
    api = TestClient(without_denials(guarded(seen, keys=KEYS, origins=[])))
    with pytest.raises(WebSocketDisconnect) as closed, api.websocket_connect("/v1/realtime"):
        pass
    assert not isinstance(closed.value, WebSocketDenialResponse)
    assert closed.value.code == 1008
    assert len(closed.value.reason.encode()) <= 123  # what fits into a close frame
    assert not seen.scopes


# ---------------------------------------------------------------- RequestId

IDS = {
    "a": True,
    "req_01.ABC-xyz": True,
    "3f2b8c1e-9d4a-4b7f-8e21-000000000000": True,
    "x" * 128: True,
    "x" * 129: False,
    "": False,
    "two words": False,
    "a,b": False,
    "a\n": False,
    "é": False,
    "<script>": False,
    "a/b": False,
    "${jndi}": False,
}


@pytest.mark.parametrize(("sent", "kept"), IDS.items())
async def test_the_id_is_the_clients_if_it_is_a_plain_one(sent: str, kept: bool) -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=[]), **WITH_KEY) as api:
        answer = await api.get("/v1/models", headers={b"x-request-id": sent.encode("latin-1")})
    request_id = answer.headers["x-request-id"]
    assert request_id == sent if kept else MADE_ID.fullmatch(request_id)
    assert answer.json()["id"] == request_id


ANSWERS = {"/v1/models": 200, "/v1/nothing": 404, "/v1/fail": 500}


@pytest.mark.parametrize(("path", "status"), ANSWERS.items())
async def test_every_answer_has_the_id_and_is_readable_for_the_page(path: str, status: int) -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=[PAGE]), Origin=PAGE) as api:
        for headers, expected in ((WITH_KEY, status), ({}, 401)):
            answer = await api.get(path, headers={**headers, "X-Request-Id": "mine"})
            assert (answer.status_code, answer.headers.get_list("x-request-id")) == (expected, ["mine"])
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert (
                answer.headers["Access-Control-Expose-Headers"]
                == "x-request-id, x-omni-voice, x-omni-finish-reason, x-omni-ignored, Retry-After"
            )


async def test_a_server_that_answers_ids_itself_is_left_to_it() -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=[], answers_id=False), **WITH_KEY) as api:
        answer = await api.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "mine" and "x-request-id" not in answer.headers


async def test_new_ids_differ() -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=[])) as api:
        ids = {(await api.get("/health")).headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


async def test_an_id_that_the_app_answers_gives_way() -> None:
    app = PlainTextResponse("inside", headers={"X-Request-Id": "of the app", "X-Other": "kept"})
    async with client(RequestId(app)) as api:
        answer = await api.get("/", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers["X-Other"] == "kept"


async def test_the_header_may_have_another_name() -> None:
    async with client(RequestId(Seen(), header="x-trace")) as api:
        answer = await api.get("/", headers={"X-Trace": "mine", "X-Request-Id": "other"})
    assert answer.headers["x-trace"] == "mine" and "x-request-id" not in answer.headers


async def test_a_state_that_the_server_shares_is_left_alone() -> None:
    seen, shared = Seen(), {"engine": "warm"}
    await sent_by(RequestId(seen), {**http_scope("/"), "state": shared})
    assert shared == {"engine": "warm"}
    assert seen.scopes[0]["state"].keys() == {"engine", "request_id"}


# --------------------------------------------------------------------- CORS


def test_without_origins_the_app_is_as_it_was() -> None:
    app = chat_app()
    assert cors(app, []) is app


async def test_a_preflight_needs_no_key() -> None:
    headers = PREFLIGHT | {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,x-request-id"}
    seen = Seen()
    async with client(guarded(seen, keys=KEYS, origins=[PAGE])) as api:
        answer = await api.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == 200 and not seen.scopes
    assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST"
    allowed = {name.strip() for name in answer.headers["Access-Control-Allow-Headers"].split(",")}
    assert allowed == {"authorization", "content-type", "x-stainless-os", "x-request-id"}
    assert "Access-Control-Allow-Credentials" not in answer.headers
    assert MADE_ID.fullmatch(answer.headers["x-request-id"])


FOREIGN = ["https://evil.example", "https://app.example.evil", "http://app.example", "https://app.example:8443", "null"]


@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_page_of_another_origin_is_not_let_in(origin: str) -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=[PAGE])) as api:
        preflight = await api.options("/v1/chat/completions", headers=PREFLIGHT | {"Origin": origin})
        answer = await api.get("/v1/models", headers=WITH_KEY | {"Origin": origin})
    assert preflight.status_code == 400
    assert "Access-Control-Allow-Origin" not in preflight.headers
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_star_lets_every_page_in_without_credentials() -> None:
    async with client(guarded(chat_app(), keys=KEYS, origins=["*"]), Origin="https://any.example") as api:
        preflight = await api.options("/v1/models", headers={"Access-Control-Request-Method": "GET"})
        answer = await api.get("/v1/models", headers=WITH_KEY | {"Cookie": "a=b"})
    for got in (preflight, answer):
        assert (got.status_code, got.headers["Access-Control-Allow-Origin"]) == (200, "*")
        assert "Access-Control-Allow-Credentials" not in got.headers


async def test_without_origins_a_preflight_is_a_request_like_others() -> None:
    async with client(guarded(Seen(), keys=KEYS, origins=[])) as api:
        assert (await api.options("/v1/models", headers=PREFLIGHT)).status_code == 401


# ----------------------------------------------------------------- lifespan


def test_the_apps_lifespan_and_its_state_pass() -> None:
    app = chat_app()
    with TestClient(guarded(app, keys=KEYS, origins=[PAGE])) as api:
        assert app.state.life == ["up"]
        assert api.get("/v1/models", headers=WITH_KEY).json()["engine"] == "warm"
    assert app.state.life == ["up", "down"]
