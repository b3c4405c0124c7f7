"""vLLM's own benchmark of a server, as `vllm bench serve` runs it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from told import ADDRESS, FOLDER, MODEL, doing
from vllm.benchmarks.serve import add_cli_args, main

REQUESTS, TOKENS = 4, 8


def run(backend: str, endpoint: str) -> dict[str, int]:
    sys.argv[1:] = [
        *("--backend", backend, "--base-url", ADDRESS, "--endpoint", endpoint, "--model", MODEL),
        *("--tokenizer", os.environ["TOKENIZER"], "--dataset-name", "random", "--random-input-len", "16"),
        *("--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", "2"),
        *("--save-result", "--result-dir", str(FOLDER), "--result-filename", f"{backend}.json"),
    ]
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
    result = json.loads((FOLDER / f"{backend}.json").read_text())
    return {
        "requests": REQUESTS,
        "completed": result["completed"],
        "failed": result["failed"],
        "tokens": result["total_output_tokens"],
        "tokens asked": REQUESTS * TOKENS,
    }


with doing("load") as seen:
    seen |= run("openai-chat", "/v1/chat/completions")

with doing("load of completions") as seen:
    seen |= run("openai", "/v1/completions")
