"""The copies of a prompt's rows on their way from the thinker's worker to the talker's, one after another on the host.

    python -m benchmarks.rows_copies [--rows 650 9000] [--at-once 1 16]

Each is timed in a process with and in one without what gives a stage's processes huge pages. Rows have the published
checkpoint's width, in bfloat16. What Ray and the card add is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from omni_cluster.engine.cards import GPU_ENVIRONMENT, HOST_ENVIRONMENT

WIDTH = 3584
ROUNDS = 9
MAX_ROWS = 20_000
"""Of all prompts of a step: 143 MB."""
ONE_PROCESS = "--in-this-process"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows_copies", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[650, 9000])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16], help="prompts of one step")
    parser.add_argument(ONE_PROCESS, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    for rows, at_once in itertools.product(asked.rows, asked.at_once):
        if asked.in_this_process:
            print(json.dumps(copies_ms(rows, at_once)))
        elif rows * at_once <= MAX_ROWS:
            show(rows, at_once)


def show(rows: int, at_once: int) -> None:
    plain, huge = (in_a_process(rows, at_once, variables) for variables in ({}, HOST_ENVIRONMENT))
    print(f"\n{rows} rows, {at_once} at once; ms of all of them, median of {ROUNDS}\n")
    print("| copy | as it is | in huge pages |\n|---|---|---|")
    for name in plain:
        print(f"| {name} | {plain[name]:.2f} | {huge[name]:.2f} |")
    print(f"| all | {sum(plain.values()):.1f} | {sum(huge.values()):.1f} |", flush=True)


def in_a_process(rows: int, at_once: int, variables: dict[str, str]) -> dict[str, float]:
    sizes = ["--rows", str(rows), "--at-once", str(at_once)]
    command = [sys.executable, "-m", "benchmarks.rows_copies", *sizes, ONE_PROCESS]
    others = {name: value for name, value in {**os.environ, **GPU_ENVIRONMENT}.items() if name not in HOST_ENVIRONMENT}
    done = subprocess.run(command, env=others | variables, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def copies_ms(count: int, at_once: int) -> dict[str, float]:
    """The median of each copy, in the order of the way."""
    import numpy as np
    import torch
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from omni_cluster.types.inputs import StageExtra
    from omni_cluster.types.rows import Rows

    def request(packed: bytes) -> EngineCoreRequest:
        params = SamplingParams(extra_args=StageExtra("a", rows=(packed,)).to_extra_args())
        return EngineCoreRequest("a", [1] * count, None, params, None, 0.0, None, None, None)

    def of(came: EngineCoreRequest) -> bytes:
        return StageExtra.of(came.sampling_params.extra_args).rows[0]

    def in_own_memory(packed: bytes) -> torch.Tensor:
        return Rows.unpack(packed, max_elements=1 << 40).tensor().clone()

    times: dict[str, float] = {}
    computed = torch.randn(count, WIDTH).to(torch.bfloat16)
    made = Rows.of("rows", 0, computed, np.arange(3 * count).reshape(3, count))
    packed = timed(times, "the worker packs the rows", lambda _: made.pack(), range(at_once))
    outputs = [EngineCoreOutput("a", [1], pooling_output=torch.from_numpy(each)) for each in packed]
    with sockets() as through:
        step = EngineCoreOutputs(outputs=outputs)
        timed(times, "engine to replica", lambda each: through(MsgpackEncoder().encode(each)), [step])
    copied = timed(times, "the reader copies them out of the store", np.array, packed)
    rows = [Rows.unpack(each, max_elements=1 << 40) for each in copied]
    requests = [request(each) for each in timed(times, "as bytes", Rows.to_bytes, rows)]
    wires = timed(times, "the requests are encoded", lambda each: MsgpackEncoder().encode(each), requests)
    decoder = MsgpackDecoder(EngineCoreRequest)
    with sockets() as through:
        frames = timed(times, "replica to engine", through, wires)
        came = timed(times, "the requests are decoded", decoder.decode, frames)
    timed(times, "as tensors again", in_own_memory, [of(each) for each in came])
    return times


def timed(times: dict[str, float], name: str, copy: Callable[[Any], Any], originals: Iterable[Any]) -> list[Any]:
    """Copies of all originals; those of one round are there together, and gone before the next."""
    took_ms = []
    for _ in range(ROUNDS):
        made: list[Any] = []
        began_s = time.perf_counter()
        made = [copy(each) for each in originals]
        took_ms.append(1000 * (time.perf_counter() - began_s))
    times[name] = statistics.median(took_ms)
    return made


@contextlib.contextmanager
def sockets() -> Iterator[Callable[[Any], Any]]:
    """Sends frames and takes them, as between vLLM's processes, but for the second process."""
    import zmq

    with (
        tempfile.TemporaryDirectory() as folder,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as push,
        context.socket(zmq.PULL) as pull,
    ):
        push.bind(f"ipc://{folder}/socket")
        pull.connect(f"ipc://{folder}/socket")

        def through(frames: Any) -> Any:
            push.send_multipart(frames, copy=False)
            return pull.recv_multipart(copy=False)

        yield through


if __name__ == "__main__":
    main()
