"""guidellm, one request after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import ADDRESS, FOLDER, MODEL, doing

REQUESTS, TOKENS = 3, 8
PROGRAM = Path(sys.executable).parent / "guidellm"

with doing("load") as seen:
    out = FOLDER / "guidellm.json"
    command = [
        *(str(PROGRAM), "run", "--backend", f"kind=openai_http,target={ADDRESS},model={MODEL}", "--disable-console"),
        *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={out}"),
    ]
    subprocess.run(command, stdout=sys.stderr, check=True)
    metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    seen |= {
        "requests": REQUESTS,
        "completed": metrics["request_totals"]["successful"],
        "failed": metrics["request_totals"]["errored"],
        "tokens": int(metrics["output_token_count"]["successful"]["total_sum"]),
        "tokens asked": REQUESTS * TOKENS,
    }
