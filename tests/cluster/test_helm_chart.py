"""deploy/helm/omni-cluster, rendered by Helm itself: by KubeRay's schema, Kubernetes' types and our loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_cluster.cluster.app import SHUTDOWN_MARGIN_S, config_of
from omni_cluster.config.schema import PipelineConfig
from tests.clients.environments import python_of
from tests.cluster.helm import (
    CHART,
    REQUIREMENTS,
    ROOT,
    SHIPPED,
    Refused,
    helm,
    rendered,
    run_helm,
    service,
    type_faults,
)
from tests.cluster.kuberay import validator
from tests.packages import NoPackages

MANIFEST = ROOT / "deploy/kuberay/rayservice.yaml"
ONE_CARD = "pools.talker=null,pools.code2wav=null,pools.thinker.stages={thinker,talker,code2wav}"
CASES = {
    "as it is": (SHIPPED,),
    "one card": ("stage_configs/qwen2_5_omni_one_gpu.yaml", ONE_CARD),
    "no card": ("stage_configs/qwen2_5_omni_tiny.yaml", ONE_CARD, "pools.thinker.gpus=0"),
    "a balancer": (SHIPPED, "service.type=LoadBalancer,service.annotations.team=speech"),
    "a claim": (SHIPPED, "models.emptyDir=null,models.persistentVolumeClaim.claimName=models"),
    "no autoscaler": (SHIPPED, "autoscaler.enabled=false"),
    "a node": (SHIPPED, "pools.talker.nodeSelector.card=h100,ingress.nodeSelector.disk=fast"),
}


@pytest.fixture(autouse=True, scope="module")
def _helm_is_here() -> None:
    try:
        helm()
        python_of(REQUIREMENTS)
    except NoPackages as error:
        pytest.skip(f"Helm or Kubernetes' types are not here: {error}")


def inline(given: dict[str, Any]) -> dict[str, Any]:
    (application,) = yaml.safe_load(given["spec"]["serveConfigV2"])["applications"]
    return application["args"]["config"]  # type: ignore[no-any-return]


def config(given: dict[str, Any]) -> PipelineConfig:
    return config_of({"config": inline(given)})


def groups(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in given["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def objects(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of Kubernetes' own types."""
    cluster = given["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield "V1PodTemplateSpec", group["template"]
    if "serveService" in given["spec"]:
        yield "V1Service", given["spec"]["serveService"]


def pods(group: dict[str, Any]) -> tuple[int, int]:
    assert group["replicas"] == group["minReplicas"]
    return group["minReplicas"], group["maxReplicas"]


def test_the_file_for_kubectl_is_the_chart() -> None:
    assert rendered() == MANIFEST.read_text()


def test_helm_finds_no_fault() -> None:
    assert "0 chart(s) failed" in run_helm("lint", "--strict", CHART, "--set-file", f"config={SHIPPED}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kuberay_and_the_loader_accept_it(case: tuple[str, ...]) -> None:
    given = service(*case)
    validator().validate(given)
    assert {stage.model_stage for stage in config(given).stages} == {"thinker", "talker", "code2wav"}


def test_kubernetes_accepts_its_pods_and_its_service() -> None:
    found = [pair for case in CASES.values() for pair in objects(service(*case))]
    assert {name for name, _ in found} == {"V1PodTemplateSpec", "V1Service"}
    assert type_faults(found) == [[]] * len(found)


def test_what_kubernetes_refuses_is_refused() -> None:
    misspelt, mistyped = (next(objects(service()))[1] for _ in range(2))
    misspelt["spec"]["containers"][0]["readynessProbe"] = {}
    mistyped["spec"]["terminationGracePeriodSeconds"] = "long"
    faults = type_faults([("V1PodTemplateSpec", misspelt), ("V1PodTemplateSpec", mistyped)])
    assert [[fault.split(":")[0] for fault in each] for each in faults] == [
        ["spec.containers.0.readynessProbe"],
        ["spec.terminationGracePeriodSeconds"],
    ]


@pytest.mark.parametrize("name", ["one card", "no card"])
def test_a_pool_may_have_several_stages(name: str) -> None:
    given = service(*CASES[name])
    assert {group: pods(spec) for group, spec in groups(given).items()} == {"ingress": (2, 2), "thinker": (1, 1)}
    assert {stage.placement.label_selector["role"] for stage in config(given).stages} == {"thinker"}
    (container,) = groups(given)["thinker"]["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == 2 * (config(given).stages[0].num_gpus or 0)


def test_a_pool_has_pods_for_the_replicas_of_its_stages(tmp_path: Path) -> None:
    written = yaml.safe_load((ROOT / SHIPPED).read_text())
    thinker, talker, code2wav = written["stages"]
    thinker |= {"num_gpus": 4, "tensor_parallel_size": 4, "hosts_per_replica": 2, "num_replicas": 3}
    thinker["engine_args"]["kv_cache_memory_bytes"] = 40_000_000_000
    talker |= {"autoscaling": {"max_replicas": 5, "signals": {"max_requests": 16}}}
    del talker["num_replicas"]
    code2wav |= {"num_gpus": 0.5}
    code2wav["advanced"]["standby_replicas"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    given = service(str(tmp_path / "config.yaml"), "pools.thinker.gpus=2")
    assert {group: pods(spec) for group, spec in groups(given).items()} == {
        "ingress": (2, 2),
        "thinker": (6, 6),
        "talker": (1, 5),
        "code2wav": (2, 2),
    }
    assert config(given).stages[0].engine_args["kv_cache_memory_bytes"] == 40_000_000_000


@pytest.mark.parametrize("name", ["qwen2_5_omni_two_gpus.yaml", "qwen3_omni_two_gpus.yaml"])
def test_stages_that_name_their_cards_have_a_pod(name: str) -> None:
    file = f"stage_configs/{name}"
    given = service(file, ONE_CARD, "pools.thinker.gpus=2")
    assert {group: pods(spec) for group, spec in groups(given).items()} == {"ingress": (2, 2), "thinker": (1, 1)}
    with pytest.raises(Refused, match=r"pools: the stage \w+ names GPU 1 in gpus, and a pod of its pool has gpus 1, "):
        service(file, ONE_CARD)


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        ({"num_gpus": 0}, 1, (1, 1)),
        ({"num_gpus": 0.6, "num_replicas": 3}, 1, (3, 3)),
        ({"num_gpus": 0.6, "num_replicas": 3}, 2, (2, 2)),
        ({"num_gpus": 2, "num_replicas": 3, "tensor_parallel_size": 2}, 3, (3, 3)),
    ],
)
def test_a_pool_has_as_many_pods_as_ray_needs_to_place_a_stage(
    changes: dict[str, Any], gpus: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    written = yaml.safe_load((ROOT / SHIPPED).read_text())
    written["stages"][0] |= changes
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    given = service(str(tmp_path / "config.yaml"), f"pools.thinker.gpus={gpus}")
    assert pods(groups(given)["thinker"]) == expected


@pytest.mark.parametrize(("num_gpus", "gpus"), [(4, 1), (1, 0), (0.5, 0)])
def test_a_replica_that_fits_on_no_pod_of_its_pool_is_refused(num_gpus: float, gpus: int, tmp_path: Path) -> None:
    written = yaml.safe_load((ROOT / SHIPPED).read_text())
    written["stages"][0] |= {"num_gpus": num_gpus, "tensor_parallel_size": max(1, int(num_gpus))}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    told = f"stage thinker takes num_gpus {num_gpus} of one pod, and a pod of its pool has gpus {gpus}."
    with pytest.raises(Refused, match=told):
        service(str(tmp_path / "config.yaml"), f"pools.thinker.gpus={gpus}")


def test_what_the_configuration_says_itself_is_kept(tmp_path: Path) -> None:
    written = yaml.safe_load((ROOT / SHIPPED).read_text()) | {"api": {"requests_per_minute": 60}}
    written["stages"][0]["advanced"] = {"placement": {"accelerator_type": "H200"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    given = config(service(str(tmp_path / "config.yaml")))
    assert (given.api.keys_variable, given.api.requests_per_minute) == ("OMNI_API_KEYS", 60)
    thinker = given.stages[0].placement
    assert (thinker.accelerator_type, thinker.label_selector) == ("H200", {"role": "thinker"})


def test_a_request_is_given_as_long_as_the_configuration_gives_it() -> None:
    values = yaml.safe_load((ROOT / CHART / "values.yaml").read_text())
    assert values["drainSeconds"] >= config(service()).limits.request_timeout_s + SHUTDOWN_MARGIN_S


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("imagePullPolicy=Always", "additional properties 'imagePullPolicy' not allowed"),
        ("pools.talker.gpus=one", "at '/pools/talker/gpus': got string, want integer"),
        ("pools.talker.memory=much", "at '/pools/talker/memory': 'much' does not match pattern"),
        ("pools.talker.stages=talker", "at '/pools/talker/stages': got string, want array"),
        ("service.type=Balancer", "at '/service/type': value must be one of 'ClusterIP', 'NodePort', 'LoadBalancer'"),
        ("upgrade=Rolling", "at '/upgrade': value must be one of 'NewCluster', 'None'"),
        ("probes.readiness.periodSeconds=0", "at '/probes/readiness/periodSeconds': minimum: got 0, want 1"),
        ("apiKeys.secret=Omni_Keys", "at '/apiKeys/secret': 'Omni_Keys' does not match pattern"),
        ("models.hostPath.path=/models", "at '/models': maxProperties: got 2, want 1"),
        ("drainSeconds=60", "drainSeconds is 60: a request may take limits.request_timeout_s, 600, and 30 more."),
        ("pools.talker=null", "pools: the stage talker of config is in 0 of them."),
        ("pools.talker.stages={thinker,talker}", "pools: the stage thinker of config is in 2 of them."),
        ("pools.talker.stages={talker,singer}", "pools: config has no stage singer. It has thinker, talker, code2wav."),
    ],
)
def test_a_wrong_value_gets_a_sentence(value: str, sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        rendered(SHIPPED, value)
    assert sentence in str(refused.value)


def test_a_configuration_must_be_given() -> None:
    with pytest.raises(
        Refused, match=r"config: it has no stages. Give a file of stage_configs: --set-file config=FILE."
    ):
        run_helm("template", "omni", CHART)
