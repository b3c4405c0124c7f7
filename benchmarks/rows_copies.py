"""The copies of a prompt's rows on their way from the thinker's worker to the talker's, one after another on the host.

    python -m benchmarks.rows_copies [--rows 650 9000]

Each is timed in a process with and in one without what gives a stage's processes huge pages. Rows have the published
checkpoint's width, in bfloat16. What Ray and the card add is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from omni_cluster.engine.cards import GPU_ENVIRONMENT, HOST_ENVIRONMENT

WIDTH = 3584
ROUNDS = 9
ONE_PROCESS = "--in-this-process"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows_copies", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[650, 9000])
    parser.add_argument(ONE_PROCESS, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_this_process:
        print(json.dumps(copies_ms(asked.rows[0])))
        return
    for rows in asked.rows:
        plain, staged = (in_a_process(rows, variables) for variables in ({}, HOST_ENVIRONMENT))
        print(f"\n{rows} rows, ms (median of {ROUNDS})\n")
        print("| copy | as it is | in huge pages |\n|---|---|---|")
        for name in plain:
            print(f"| {name} | {plain[name]:.2f} | {staged[name]:.2f} |")
        print(f"| all | {sum(plain.values()):.1f} | {sum(staged.values()):.1f} |", flush=True)


def in_a_process(rows: int, variables: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.rows_copies", "--rows", str(rows), ONE_PROCESS]
    others = {name: value for name, value in {**os.environ, **GPU_ENVIRONMENT}.items() if name not in HOST_ENVIRONMENT}
    done = subprocess.run(command, env=others | variables, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def copies_ms(count: int) -> dict[str, float]:
    """The median of each copy, in the order of the way."""
    import numpy as np
    import torch
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from omni_cluster.inputs import StageExtra
    from omni_cluster.payloads import PromptEmbedsPayload, RowsChunk

    times: dict[str, float] = {}
    computed = torch.randn(count, WIDTH).to(torch.bfloat16)
    positions = torch.arange(3 * count).view(3, count)
    packed = timed(times, "the worker packs a request's rows", lambda: RowsChunk(0, computed, positions).pack())
    output = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], pooling_output=packed)])
    with sockets() as through:
        timed(times, "engine to replica", lambda: through(MsgpackEncoder().encode(output)))
    timed(times, "the reader copies them out of the store", lambda: np.array(packed.numpy()))
    rows = RowsChunk.unpack(packed, max_elements=1 << 40).rows
    whole = timed(times, "prompt's and reply's rows are joined", lambda: torch.cat([rows, computed[:1]]))
    payload = timed(times, "as bytes", lambda: PromptEmbedsPayload.from_tensor(whole))
    params = SamplingParams(extra_args=StageExtra("a", prompt_embeds=payload).to_extra_args())
    request = EngineCoreRequest("a", [1] * count, None, params, None, 0.0, None, None, None)
    wire = timed(times, "the request is encoded", lambda: MsgpackEncoder().encode(request))
    decoder = MsgpackDecoder(EngineCoreRequest)
    with sockets() as through:
        frames = timed(times, "replica to engine", lambda: through(wire))
        came = timed(times, "the request is decoded", lambda: decoder.decode(frames))
    extra = StageExtra.of(came.sampling_params.extra_args)
    timed(times, "as a tensor again", lambda: extra.prompt_embeds.to_tensor(max_elements=1 << 40))
    return times


def timed(times: dict[str, float], name: str, copy: Callable[[], Any]) -> Any:
    made, took_ms = None, []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        made = copy()
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
