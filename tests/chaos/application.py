"""What a soak asks: the toy configuration over two nodes, or a given one on the only node of a host."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.served.app import ROOT, ServedApp, serve_run, serve_run_over_nodes

SECOND_NODE = "second"
TOY_CONFIG = ROOT / "stage_configs" / "qwen2_5_omni_2x2_tiny.yaml"
ONE_PER_NODE = {"max_replicas_per_node": 1}
CLIENTS = 16
"""Of a soak, unless it is told otherwise."""


def started(
    config: Path | None, checkpoint: Path | None, cards_of_a_node: int = 0
) -> AbstractContextManager[ServedApp]:
    """The application of `config` on one node, or over two with cards; without one, the toy application over two."""
    if config is None:
        return over_two_nodes(_doubled(_read(TOY_CONFIG)))
    if cards_of_a_node:
        return over_two_nodes(with_checkpoint(_read(config), checkpoint), cards_of_a_node)
    return on_one_node(config, checkpoint)


@contextmanager
def over_two_nodes(config: dict[str, Any], cards_of_a_node: int = 0) -> Iterator[ServedApp]:
    """Each node with a replica of all stages and an ingress."""
    roles = ("head", SECOND_NODE)
    with (
        _written(config) as path,
        serve_run_over_nodes(f"config={path}", roles=roles, cards_of_a_node=cards_of_a_node) as app,
    ):
        yield app


@contextmanager
def on_one_node(config: Path, checkpoint: Path | None) -> Iterator[ServedApp]:
    """As many replicas as the configuration says."""
    with _written(with_checkpoint(_read(config), checkpoint)) as path, serve_run(f"config={path}") as app:
        yield app


def with_checkpoint(config: dict[str, Any], checkpoint: Path | None) -> dict[str, Any]:
    """The configuration with a folder in the place of its model, where one is given."""
    return config if checkpoint is None else config | {"model": str(checkpoint.absolute())}


def model_of(app: ServedApp) -> str:
    """What requests call the model."""
    return str(app.client.get("/v1/models").json()["data"][0]["id"])


def _doubled(config: dict[str, Any]) -> dict[str, Any]:
    """A replica of each stage on each node; the one that is left of a stage has places for all clients."""
    thinker, talker, code2wav = config["stages"]
    code2wav["num_replicas"] = 2
    code2wav["advanced"]["options"]["max_batch_size"] = CLIENTS
    for stage in (thinker, talker):
        stage["engine_args"]["max_num_seqs"] = CLIENTS
    for stage in config["stages"]:
        stage["placement"] = ONE_PER_NODE
    return config | {"ingress_placement": ONE_PER_NODE}


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    return config


@contextmanager
def _written(config: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chaos.yaml"
        path.write_text(yaml.safe_dump(config))
        yield path
