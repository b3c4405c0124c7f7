"""NVIDIA's aiperf, by chat and by completions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import ADDRESS, FOLDER, MODEL, doing

REQUESTS = 4
PROGRAM = Path(sys.executable).parent / "aiperf"

for did, endpoint in (("load", "chat"), ("load of completions", "completions"), ("load of responses", "responses")):
    with doing(did) as seen:
        out = FOLDER / endpoint
        command = [
            *(str(PROGRAM), "profile", "--model", MODEL, "--url", ADDRESS, "--endpoint-type", endpoint, "--streaming"),
            *("--tokenizer", os.environ["TOKENIZER"], "--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--isl", "16", "--osl", "8", "--ui", "none", "--artifact-dir", str(out)),
        ]
        subprocess.run(command, stdout=sys.stderr, check=True)
        result = json.loads((out / "profile_export_aiperf.json").read_text())
        failed = sum(error["count"] for error in result["error_summary"])
        seen |= {
            "requests": REQUESTS,
            "completed": int(result["request_count"]["avg"]),
            "failed": failed,
            # It reads no usage of a response that ends at its length, as OpenAI's own does.
            "tokens": int(result["total_osl"]["avg"]),
        }
