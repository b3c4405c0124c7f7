"""What a call of a sound stage's worker in a process of its own takes, and what both ends use of a core meanwhile.

    python -m benchmarks.worker_calls [--calls 200] [--pauses-ms 0 5 30]

The worker has the embedded tiny checkpoint and runs on the CPU. What is called costs it nothing, so a call is its way
there and back. `--pauses-ms`: from an answer to the next call.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import psutil

from omni_cluster.config.schema import PipelineConfig, StageConfig
from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint
from omni_cluster.vllm_engine.engine_args import OmniEngineArgs
from omni_cluster.vllm_engine.stage_worker import StageWorker


def made_worker() -> StageWorker:
    model = str(embedded_checkpoint("tiny"))
    stage = StageConfig(stage_id=0, model_stage="code2wav", num_gpus=0, final_output_type="audio")
    pipeline = PipelineConfig.model_construct(model=model, family="qwen2_5_omni", stages=[stage])
    args = OmniEngineArgs.for_sound_stage(stage, pipeline, model)
    args.distributed_executor_backend = "mp"
    return StageWorker(args)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def line(worker: StageWorker, calls: int, pause_ms: float) -> str:
    """Of so many calls: microseconds of one, and shares of a core."""
    caller = psutil.Process()
    called = max(caller.children(recursive=True), key=lambda one: one.memory_info().rss)
    before = cpu_s(called), cpu_s(caller)
    took_us, began_s = [], time.perf_counter()
    for _ in range(calls):
        called_s = time.perf_counter()
        worker.call("steps_of_a_job")
        took_us.append(1e6 * (time.perf_counter() - called_s))
        time.sleep(pause_ms / 1000)
    wall_s = time.perf_counter() - began_s
    used_s = cpu_s(called) - before[0], cpu_s(caller) - before[1]
    shares = [100 * each_s / wall_s for each_s in used_s]
    figures = " | ".join(f"{figure:.0f}" for figure in [*np.percentile(took_us, [50, 95, 100]), *shares])
    return f"| {pause_ms:g} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--pauses-ms", type=float, nargs="*", default=[0.0, 5.0, 30.0])
    options = parser.parse_args()
    worker = made_worker()
    worker.call("steps_of_a_job")
    print("| pause, ms | a call, us: p50 | p95 | longest | worker, % of a core | caller |\n" + 6 * "|---" + "|")
    for pause_ms in options.pauses_ms:
        print(line(worker, options.calls, pause_ms), flush=True)
    worker.shutdown()


if __name__ == "__main__":
    main()
