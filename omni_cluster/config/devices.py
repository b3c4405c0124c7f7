"""What the devices of a stage must come to: cards, the parts of its model, and the hosts that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_cluster.config.problems import MISSING, Problem

if TYPE_CHECKING:
    from omni_cluster.config.schema import StageConfig


def device_problems(stage: StageConfig) -> list[Problem]:
    if stage.gpus is not None:
        return _pinned_problems(stage.gpus, stage)
    if stage.num_gpus is None:
        return [Problem("num_gpus", MISSING, "say how many GPUs one replica takes, for example 1, or 0 for CPU")]
    if stage.num_gpus > 1 and not stage.num_gpus.is_integer():
        fix = f"a replica takes a part of one card or whole cards, for example {round(stage.num_gpus)}"
        return [Problem("num_gpus", stage.num_gpus, fix)]
    if stage.num_gpus == 0:
        return _hosts_problems(stage)  # on the CPU, parts are processes: as many as wanted
    cards = max(1, int(stage.num_gpus))
    return _parallel_problems(stage, cards, source=f"num_gpus is {stage.num_gpus:g}") or _hosts_problems(stage)


def _pinned_problems(gpus: list[int], stage: StageConfig) -> list[Problem]:
    if stage.num_gpus is not None:
        fix = f"num_gpus is {stage.num_gpus:g} too, keep one of the two, for example num_gpus: 1"
        return [Problem("gpus", gpus, fix)]
    if len(set(gpus)) < len(gpus):
        return [Problem("gpus", gpus, f"a device stands there twice, use {sorted(set(gpus))}")]
    if min(gpus) < 0:
        return [Problem("gpus", gpus, "device numbers start at 0, for example [0]")]
    if stage.hosts_per_replica > 1:
        fix = f"gpus names cards of one host, say num_gpus: {len(gpus)} instead"
        return [Problem("hosts_per_replica", stage.hosts_per_replica, fix)]
    return _parallel_problems(stage, cards=len(gpus), source=f"gpus names {len(gpus)}")


def _parallel_problems(stage: StageConfig, cards: int, source: str) -> list[Problem]:
    if stage.num_parts == cards:
        return []
    if stage.pipeline_parallel_size == 1:
        return [Problem("tensor_parallel_size", stage.tensor_parallel_size, f"{source}, so it must be {cards}")]
    fix = f"{source}, so times tensor_parallel_size, {stage.tensor_parallel_size}, it must be {cards}"
    return [Problem("pipeline_parallel_size", stage.pipeline_parallel_size, fix)]


def _hosts_problems(stage: StageConfig) -> list[Problem]:
    hosts = stage.hosts_per_replica
    if hosts == 1:
        return []
    if stage.num_parts % hosts:
        fix = f"each host has as many of the {stage.num_parts} parts, so it must divide {stage.num_parts}"
        return [Problem("hosts_per_replica", hosts, fix)]
    if stage.placement.max_replicas_per_node is not None:
        fix = "Ray spreads the hosts of one replica by itself, so leave placement.max_replicas_per_node out"
        return [Problem("hosts_per_replica", hosts, fix)]
    if stage.num_gpus and "kv_cache_memory_bytes" not in stage.engine_args:
        fix = "cards of several hosts are not measured, say how much each has for its KV cache, for example 40000000000"
        return [Problem("engine_args.kv_cache_memory_bytes", MISSING, fix)]
    return []
