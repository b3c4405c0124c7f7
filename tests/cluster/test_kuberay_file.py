"""deploy/kuberay: the RayService by KubeRay's schema, Ray's own reading of it, Serve's schema and our loader. It is a
rendering of the chart, as tests/cluster/test_helm_chart.py shows."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from omni_cluster.cluster.app import SHUTDOWN_MARGIN_S, config_of
from omni_cluster.config.schema import PipelineConfig, StageConfig
from tests.cluster.kuberay import validator

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/kuberay/rayservice.yaml"
SCRIPT = ROOT / "deploy/kuberay/pre_stop.sh"
SHIPPED = ROOT / "stage_configs/qwen2_5_omni.yaml"
OWN = frozenset({"cache_dir", "api", "ingress_placement"})
"""What the file says besides the configuration that is shipped, apart from its stages' placement."""
STOP_S = 30


def service() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())  # type: ignore[no-any-return]


def groups() -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in service()["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def serve_config() -> dict[str, Any]:
    return yaml.safe_load(service()["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def inline() -> dict[str, Any]:
    (application,) = serve_config()["applications"]
    return application["args"]["config"]  # type: ignore[no-any-return]


def config() -> PipelineConfig:
    return config_of({"config": inline()})


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def node_types() -> dict[str, dict[str, Any]]:
    """What Ray's autoscaler will take the groups for: as it reads them on the head, checked by its own schema."""
    cluster = {"metadata": {"name": "omni", "namespace": "default"}, "spec": service()["spec"]["rayClusterConfig"]}
    return _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]  # type: ignore[no-any-return]


def test_kuberay_accepts_the_file() -> None:
    validator().validate(service())


def wrong_group(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["workerGroupSpecs"][1]["gpus"] = 1


def wrong_cluster(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["autoscaling"] = True


def labels_of_ray_start(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["workerGroupSpecs"][1]["rayStartParams"]["labels"] = "role=thinker"


def wrong_token(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["authOptions"]["mode"] = "tokens"


def number_of_cpus(spec: dict[str, Any]) -> None:
    spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def wrong_probe(spec: dict[str, Any]) -> None:
    container(spec["rayClusterConfig"]["headGroupSpec"])["livenessProbe"]["httpget"] = {}


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (wrong_group, "'gpus' was unexpected"),
        (wrong_cluster, "'autoscaling' was unexpected"),
        (labels_of_ray_start, "'labels' should not be valid"),
        (wrong_token, "'tokens' is not one of"),
        (number_of_cpus, "0 is not of type 'string'"),
        (wrong_probe, "'httpget' was unexpected"),
    ],
)
def test_what_kuberay_refuses_is_refused(spoil: Callable[[dict[str, Any]], None], fault: str) -> None:
    spoiled = service()
    spoil(spoiled["spec"])
    with pytest.raises(ValidationError, match=fault):
        validator().validate(spoiled)


def test_serve_accepts_its_part() -> None:
    given = serve_config()
    ServeDeploySchema.model_validate(given)
    # Serve itself says nothing of keys that it does not know.
    assert set(given) <= set(ServeDeploySchema.model_fields)
    assert set(given["http_options"]) <= set(HTTPOptionsSchema.model_fields)
    assert all(set(application) <= set(ServeApplicationSchema.model_fields) for application in given["applications"])
    assert given["proxy_location"] == "EveryNode"  # with HeadOnly no worker would ever be ready
    assert given["http_options"]["host"] == "0.0.0.0" and "request_timeout_s" not in given["http_options"]


def test_its_configuration_is_the_shipped_one_with_placement() -> None:
    def model(given: dict[str, Any]) -> dict[str, Any]:
        config = config_of({"config": given}).model_dump()
        stages = [{key: value for key, value in stage.items() if key != "placement"} for stage in config["stages"]]
        return {key: value for key, value in config.items() if key not in OWN} | {"stages": stages}

    assert config().cache_dir is not None
    assert model(inline()) == model(yaml.safe_load(SHIPPED.read_text()))


def test_each_stage_finds_its_cards_in_a_group_of_its_own() -> None:
    types = node_types()
    by_labels = {frozenset(kind["labels"].items()): name for name, kind in types.items()}
    stages = {by_labels[frozenset(stage.placement.label_selector.items())]: stage for stage in config().stages}
    assert len(stages) == len(config().stages)
    for name, stage in stages.items():
        card = types[name]["resources"]["GPU"]
        assert types[name]["min_workers"] * card == stage.min_replicas * stage.gpus_per_replica
        assert types[name]["max_workers"] * card == stage.max_replicas * stage.gpus_per_replica
        assert types[name]["resources"]["CPU"] >= cpus_per_node(stage, card)
    rest = {name for name, kind in types.items() if not kind["resources"].get("GPU")}
    assert set(types) - rest == set(stages)
    assert rest == {"headgroup", by_labels[frozenset(config().ingress_placement.label_selector.items())]}
    assert types["headgroup"]["resources"]["CPU"] == 0 and not types["headgroup"]["labels"]


def cpus_per_node(stage: StageConfig, cards: float) -> float:
    return stage.num_cpus * cards / stage.gpus_per_replica


def test_what_runs_may_end_before_anything_is_taken_away() -> None:
    longest = config().limits.request_timeout_s + SHUTDOWN_MARGIN_S
    assert service()["spec"]["rayClusterDeletionDelaySeconds"] >= longest
    for group in groups().values():
        *command, port, wait_s = container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["bash", f"/opt/omni_cluster/{SCRIPT.relative_to(ROOT)}"]
        assert int(port) == serve_config()["http_options"]["port"]
        assert int(wait_s) >= longest
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= int(wait_s) + STOP_S


def test_a_worker_is_ready_when_its_proxy_is() -> None:
    assert "/api/healthz" in PUBLIC_EXACT_PATHS  # the kubelet has no token
    port = serve_config()["http_options"]["port"]
    head = service()["spec"]["rayClusterConfig"]["headGroupSpec"]
    for group in (head, *groups().values()):
        assert {"name": "serve", "containerPort": port} in container(group)["ports"]
        assert container(group)["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    for group in groups().values():
        assert container(group)["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": port}


def test_no_pod_is_open_or_privileged() -> None:
    cluster = service()["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token", "secretName": "omni-ray-token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (keys,) = [each for each in container(group)["env"] if each["name"] == config().api.keys_variable]
        assert keys["valueFrom"]["secretKeyRef"]["name"] == "omni-api"
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"]
        assert not container(group)["securityContext"]["allowPrivilegeEscalation"]
    assert all(group["template"]["spec"]["automountServiceAccountToken"] is False for group in groups().values())


def test_a_pod_that_ends_waits_for_its_connections(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    (tmp_path / "ray").write_text(f'#!/bin/sh\n[ "$*" = stop ] && touch {stopped}\n')
    (tmp_path / "ray").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            subprocess.run(["bash", SCRIPT, str(port), "1"], env=environment, check=True, timeout=60)
            assert stopped.exists()  # it does not wait for longer than it may
            stopped.unlink()
            waits = subprocess.Popen(["bash", SCRIPT, str(port), "3600"], env=environment)
            with pytest.raises(subprocess.TimeoutExpired):
                waits.wait(1.5)
            assert not stopped.exists()
        assert waits.wait(60) == 0
    assert stopped.exists()
