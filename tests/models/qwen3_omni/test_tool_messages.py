"""Tools as Qwen3's published templates write them: nothing stands in place of a system message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_cluster.models.chat_files import ChatTemplate
from omni_cluster.models.tool_messages import as_text

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOLS = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{json.dumps(TOOL)}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
HELLO = {"role": "user", "content": "What is it like?"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}],
}
RAIN, SUN = ({"role": "tool", "content": text} for text in ("Rain.", "Sun."))
RESULTS = "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nSun.\n</tool_response>"


def turns(*said: tuple[str, str]) -> str:
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    return f"{written}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([HELLO], turns(("system", TOOLS), ("user", "What is it like?"))),
        (
            [{"role": "system", "content": "Be brief."}, HELLO],
            turns(("system", f"Be brief.\n\n{TOOLS}"), ("user", "What is it like?")),
        ),
        (
            [HELLO, CALLED, RAIN, SUN],
            turns(("system", TOOLS), ("user", "What is it like?"), ("assistant", CALL), ("user", RESULTS)),
        ),
        (
            [HELLO, {**CALLED, "content": "Let me see."}, RAIN, SUN],
            turns(
                ("system", TOOLS),
                ("user", "What is it like?"),
                ("assistant", f"Let me see.\n{CALL}"),
                ("user", RESULTS),
            ),
        ),
    ],
)
def test_tools_calls_and_results_are_written_as_text(
    qwen3_folder: Path, messages: list[dict[str, Any]], wanted: str
) -> None:
    assert ChatTemplate(qwen3_folder).render(as_text(messages, [TOOL])) == wanted
