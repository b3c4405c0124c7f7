"""What is served: the model, its LoRA adapters and its voices."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from omni_cluster.engine.build import BoundPipeline
from omni_cluster.openai_api.errors import BadRequest
from omni_cluster.openai_api.wire import check_model
from omni_cluster.server.limits import api_defaults
from omni_cluster.server.routes import add_get


class ModelsEndpoint:
    """`/v1/models`, `/v1/models/NAME` and `/v1/audio/voices`."""

    def __init__(self, bound: BoundPipeline) -> None:
        self._names = bound.config.models
        self._voices = bound.family.voices
        self._makers = {part: name for part, name in bound.family.makers().items() if name in bound.specs}
        sound = bound.sound
        self._sound = sound and {"sample_rate_hz": sound.sample_rate_hz, "codes_per_s": sound.codes_per_s}
        self._aliases = dict(api_defaults(bound).voice_aliases)
        self._created = int(time.time())

    def add_to(self, api: FastAPI) -> None:
        add_get(api, "/v1/models", self.models)
        add_get(api, "/v1/models/{name:path}", self.model, response_model=None)
        add_get(api, "/v1/audio/voices", self.voices)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in self._names]}

    async def model(self, name: str) -> Response:
        """Without a name all of them: some clients end the path by a slash."""
        if not name:
            return JSONResponse(await self.models())
        try:
            check_model(name, self._names)
        except BadRequest as error:
            return JSONResponse(error.body(), error.status)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """A LoRA adapter's has the model that it changes."""
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "omni_cluster"}
        if name != self._names[0]:
            model["parent"] = self._names[0]
        return model | {"voices": list(self._voices), "stages": self._makers, "sound": self._sound}

    async def voices(self) -> dict[str, Any]:
        """The default voice first. `voices` as Open WebUI reads them, `names` and `aliases` for people."""
        voices = [{"id": name, "name": name} for name in self._voices]
        return {"voices": voices, "names": list(self._voices), "aliases": self._aliases}
