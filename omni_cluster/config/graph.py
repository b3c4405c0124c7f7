"""What must hold between the stages of a pipeline: each is fed by others, and something comes to the client."""

from __future__ import annotations

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from omni_cluster.config.problems import Problem

if TYPE_CHECKING:
    from omni_cluster.config.schema import StageConfig


def graph_problems(stages: list[StageConfig]) -> list[Problem]:
    # One kind at a time: an id given twice would show up again as a source that is missing.
    return _id_problems(stages) or _source_problems(stages) or _cycle_problems(stages) or _output_problems(stages)


def _id_problems(stages: list[StageConfig]) -> list[Problem]:
    free = max(stage.stage_id for stage in stages) + 1
    first_at: dict[int, int] = {}
    problems = []
    for index, stage in enumerate(stages):
        first = first_at.setdefault(stage.stage_id, index)
        if first != index:
            fix = f"stages[{first}] has that id already, use another, for example {free}"
            problems.append(Problem(f"stages[{index}].stage_id", stage.stage_id, fix))
    return problems


def _source_problems(stages: list[StageConfig]) -> list[Problem]:
    ids = sorted({stage.stage_id for stage in stages})
    return [
        Problem(f"stages[{index}].engine_input_source", stage.engine_input_source, fix)
        for index, stage in enumerate(stages)
        if (fix := _source_fix(stage, ids)) is not None
    ]


def _source_fix(stage: StageConfig, ids: list[int]) -> str | None:
    others = [stage_id for stage_id in ids if stage_id != stage.stage_id]
    use = f"use ids among {', '.join(map(str, others))}" if others else "use [] for a single stage"
    for source, count in Counter(stage.engine_input_source).items():
        if source == stage.stage_id:
            return f"stage {source} cannot feed itself, {use}"
        if source not in ids:
            return f"no stage has id {source}, {use}"
        if count > 1:
            return f"stage {source} stands there {count} times, use {sorted(set(stage.engine_input_source))}"
    return None


def _cycle_problems(stages: list[StageConfig]) -> list[Problem]:
    try:
        TopologicalSorter({stage.stage_id: stage.engine_input_source for stage in stages}).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1]
        index = next(index for index, stage in enumerate(stages) if stage.stage_id == circle[0])
        path = " -> ".join(map(str, circle))
        fix = f"stages {path} feed each other in a circle, use [] for the stage that comes first"
        return [Problem(f"stages[{index}].engine_input_source", stages[index].engine_input_source, fix)]
    return []


def _output_problems(stages: list[StageConfig]) -> list[Problem]:
    last = len(stages) - 1
    if all(stage.final_output_type is None for stage in stages):
        fix = "no stage gives the client anything, set it to text, audio or image on at least one stage"
        return [Problem(f"stages[{last}].final_output_type", None, fix)]
    consumed = {source for stage in stages for source in stage.engine_input_source}
    return [
        Problem(
            f"stages[{index}].final_output_type",
            None,
            f"nothing consumes stage {stage.stage_id} ({stage.model_stage}), set it to text, audio or image, "
            f"or add {stage.stage_id} to another stage's engine_input_source",
        )
        for index, stage in enumerate(stages)
        if stage.final_output_type is None and stage.stage_id not in consumed
    ]
