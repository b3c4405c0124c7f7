"""Rules between the stages of a configuration, and what the models admit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from omni_cluster.config.schema import PipelineConfig, StageConfig


def stage(stage_id: int, sources: list[int], output: str | None = "text", **changes: Any) -> dict[str, Any]:
    given = {"stage_id": stage_id, "model_stage": f"stage{stage_id}", "engine_input_source": sources, "num_gpus": 0}
    return {**given, "final_output_type": output, **changes}


def pipeline(*stages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "preset:tiny", "family": "qwen2_5_omni", "stages": list(stages)}


def accepts(config: dict[str, Any]) -> bool:
    try:
        PipelineConfig.model_validate(config)
    except ValidationError:
        return False
    return True


def reaches_itself(start: int, sources: dict[int, list[int]]) -> bool:
    seen: set[int] = set()
    waiting = list(sources[start])
    while waiting:
        at = waiting.pop()
        if at == start:
            return True
        if at not in seen:
            seen.add(at)
            waiting.extend(sources[at])
    return False


def is_sound(sources: dict[int, list[int]]) -> bool:
    """The rule in its own words: known ids, none twice, and no stage that its own output reaches."""
    known = all(source in sources for listed in sources.values() for source in listed)
    once = all(len(set(listed)) == len(listed) for listed in sources.values())
    return known and once and not any(reaches_itself(start, sources) for start in sources)


@st.composite
def graphs(draw: st.DrawFn) -> dict[int, list[int]]:
    ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    # Mostly ids that exist, and mostly few sources: so that sound graphs are about as frequent as unsound ones.
    source = st.sampled_from(ids) | st.integers(0, 9) if draw(st.booleans()) else st.sampled_from(ids)
    return {stage_id: draw(st.lists(source, max_size=2)) for stage_id in ids}


@given(graphs())
def test_a_graph_is_accepted_iff_it_is_sound(sources: dict[int, list[int]]) -> None:
    stages = [stage(stage_id, listed) for stage_id, listed in sources.items()]
    assert accepts(pipeline(*stages)) == is_sound(sources)


@given(st.permutations(range(6)), st.data())
def test_every_graph_drawn_along_an_order_is_accepted(order: list[int], data: st.DataObject) -> None:
    subsets = [data.draw(st.lists(st.sampled_from(order[:i]), unique=True)) if i else [] for i in range(len(order))]
    stages = [stage(stage_id, listed) for stage_id, listed in zip(order, subsets, strict=True)]
    assert accepts(pipeline(*data.draw(st.permutations(stages))))


@given(graphs().filter(is_sound), st.data())
def test_each_stage_is_consumed_or_reaches_the_client(sources: dict[int, list[int]], data: st.DataObject) -> None:
    outputs = {stage_id: data.draw(st.sampled_from([None, "text", "audio"])) for stage_id in sources}
    consumed = {source for listed in sources.values() for source in listed}
    useful = any(outputs.values()) and all(outputs[stage_id] or stage_id in consumed for stage_id in sources)
    assert accepts(pipeline(*(stage(i, listed, outputs[i]) for i, listed in sources.items()))) == useful


@pytest.mark.parametrize(
    ("devices", "gpus_per_replica"),
    [
        ({"num_gpus": 0}, 0),
        ({"num_gpus": 0.25}, 0.25),
        ({"num_gpus": 1}, 1),
        ({"num_gpus": 4, "tensor_parallel_size": 4}, 4),
        ({"num_gpus": None, "gpus": [3]}, 1),
        ({"num_gpus": None, "gpus": [0, 2], "tensor_parallel_size": 2}, 2),
    ],
)
def test_gpus_of_one_replica(devices: dict[str, Any], gpus_per_replica: float) -> None:
    assert StageConfig.model_validate(stage(0, [], **devices)).gpus_per_replica == gpus_per_replica


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (1, 1)),
        ({"num_replicas": None}, (1, 1)),
        ({"num_replicas": 3}, (3, 3)),
        ({"num_replicas": 3, "standby_replicas": 2}, (5, 5)),
        ({"standby_replicas": 1}, (2, 2)),
        ({"autoscaling": {"min_replicas": 2, "max_replicas": 5, "signals": {"max_requests": 24}}}, (2, 5)),
        ({"autoscaling": {"max_replicas": 5, "signals": {"max_requests": 24}, "initial_replicas": 5}}, (1, 5)),
        ({"autoscaling": {"min_replicas": 0, "max_replicas": 5, "signals": {"max_requests": 24}}}, (0, 5)),
    ],
)
def test_replica_bounds(given: dict[str, Any], bounds: tuple[int, int]) -> None:
    parsed = StageConfig.model_validate(stage(0, [], **given))
    assert (parsed.min_replicas, parsed.max_replicas) == bounds


def test_one_replica_is_the_default_only_without_autoscaling() -> None:
    assert StageConfig.model_validate(stage(0, [])).num_replicas == 1
    assert (
        StageConfig.model_validate(
            stage(0, [], autoscaling={"max_replicas": 2, "signals": {"max_requests": 24}})
        ).num_replicas
        is None
    )


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    config = PipelineConfig.model_validate(pipeline(stage(0, [])))
    with pytest.raises(ValidationError, match="frozen"):
        config.model = "another"


def test_the_room_loads_without_the_heavy_libraries() -> None:
    code = (
        "import sys, omni_cluster.config.schema, omni_cluster.config.loader, omni_cluster.config.plan\n"
        "print(sorted({'vllm', 'ray', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "engine_args",
    [
        {"max_model_len": -1},
        {"max_model_len": None, "max_num_seqs": None, "limit_mm_per_prompt": None},
        {"limit_mm_per_prompt": {"audio": 0, "video": {"count": 1, "num_frames": 32}, "image": {"width": 512}}},
    ],
)
def test_sizes_of_an_engine_may_be_all_that_vllm_takes(engine_args: dict[str, Any]) -> None:
    assert accepts(pipeline(stage(0, [], engine_args=engine_args)))


@pytest.mark.parametrize("origin", ["*", "null", "https://app.example", "http://[::1]:8080", "chrome-extension://abc"])
def test_what_browsers_send_may_be_an_origin(origin: str) -> None:
    assert accepts(pipeline(stage(0, [])) | {"api": {"cors_origins": [origin]}})


@pytest.mark.parametrize(
    "host", ["cdn.example.org", "Example.ORG", "bücher.example", "192.0.2.1", "2001:db8::1", "[::1]"]
)
def test_names_and_addresses_may_be_allowed_hosts(host: str) -> None:
    assert accepts(pipeline(stage(0, [])) | {"fetch": {"allowed_hosts": [host]}})
