"""deploy/serve_config.yaml by Serve's schema, which says nothing of unknown keys, and by our loader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from omni_cluster.cluster.app import bind_app, config_of
from omni_cluster.config.schema import PipelineConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/serve_config.yaml"
CHECKOUT = "/home/ubuntu/omni_cluster/"


def accepted(text: str) -> list[dict[str, Any]]:
    """Its applications, once Serve takes the file and knows each key of it."""
    given = yaml.safe_load(text)
    ServeDeploySchema.model_validate(given)
    assert set(given) <= set(ServeDeploySchema.model_fields)
    assert set(given["http_options"]) <= set(HTTPOptionsSchema.model_fields)
    for application in given["applications"]:
        assert set(application) <= set(ServeApplicationSchema.model_fields)
        assert application["import_path"] == "deployments:app"
    return given["applications"]  # type: ignore[no-any-return]


def config(application: dict[str, Any]) -> PipelineConfig:
    args = application["args"]
    if isinstance(args["config"], str):
        assert args["config"].startswith(CHECKOUT)
        args = {"config": str(ROOT / args["config"].removeprefix(CHECKOUT))}
    return config_of(args)


def test_the_file_deploys_one_application_by_its_path() -> None:
    (application,) = accepted(FILE.read_text())
    assert {stage.model_stage for stage in config(application).stages} == {"thinker", "talker", "code2wav"}
    assert bind_app(config(application))


def test_applications_stand_beside_each_other_as_the_file_shows() -> None:
    first, second = accepted(re.sub(r"^  # (?=- |  )", "  ", FILE.read_text(), flags=re.M))
    assert (first["name"], first["route_prefix"]) == ("omni", "/")
    assert (second["name"], second["route_prefix"]) == ("text", "/text")
    assert [stage.model_stage for stage in config(second).stages] == ["thinker"]
    assert bind_app(config(second))
