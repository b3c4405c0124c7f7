"""The playground: a page to talk to the model, at `/`, and the files that it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from omni_cluster.server.routes import add_get
from omni_cluster.server.services import Services

FOLDER: Final = Path(__file__).parents[1] / "playground"
PAGE: Final = "index.html"
MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NAMES: Final = frozenset(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES) - {PAGE}
PATHS: Final = frozenset({"/", *(f"/playground/{name}" for name in NAMES)})
"""They need no key: a browser sends none for a page. What the page asks of the API needs one."""
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",  # WebSockets of the server too
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page loads nothing from elsewhere, whatever a model writes into it, and stands in no other page."""
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Permissions-Policy": "microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # another version of the server has other files by the same names
}


class PlaygroundEndpoint:
    """Reads its files once: what is asked for afterwards names no path."""

    def __init__(self, services: Services) -> None:
        self._files = {name: (FOLDER / name).read_bytes() for name in (PAGE, *NAMES)}

    def add_to(self, api: FastAPI) -> None:
        add_get(api, "/", self.page, include_in_schema=False)
        add_get(api, "/playground/{name}", self.file, include_in_schema=False)

    async def page(self) -> Response:
        return self._answer(PAGE)

    async def file(self, name: str) -> Response:
        if name not in NAMES:
            raise HTTPException(404)
        return self._answer(name)

    def _answer(self, name: str) -> Response:
        return Response(self._files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)
