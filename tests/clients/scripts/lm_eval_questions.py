"""lm-eval with a question of one's own, by both of its clients for servers of this API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from told import FOLDER, MAX_TOKENS, MODEL, QUESTION, URL, doing

PROGRAM = Path(sys.executable).parent / "lm_eval"
TASK = {
    "task": "told",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "questions.json")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": [], "max_gen_toks": MAX_TOKENS, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}
(FOLDER / "questions.json").write_text(json.dumps([{"question": QUESTION, "answer": ""}]))
(FOLDER / "told.yaml").write_text(json.dumps(TASK))


def said(model: str, endpoint: str, *options: str) -> str:
    """What the server answered, by lm-eval's own record."""
    out = FOLDER / model
    command = [
        *(str(PROGRAM), "run", "--model", model, "--tasks", "told", "--include_path", str(FOLDER), *options),
        *("--model_args", f"model={MODEL},base_url={URL}/{endpoint},tokenizer_backend=None,tokenized_requests=False"),
        *("--log_samples", "--output_path", str(out)),
    ]
    subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=sys.stderr, check=True)
    (samples,) = out.rglob("samples_told_*.jsonl")
    return json.loads(samples.read_text())["resps"][0][0]


with doing("chat") as seen:
    seen["text"] = said("local-chat-completions", "chat/completions", "--apply_chat_template")

with doing("completions") as seen:
    seen["text"] = said("local-completions", "completions")
