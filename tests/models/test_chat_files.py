"""Read from files, the template and the tokenizer say what transformers' processor says."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from omni_cluster.models.chat_files import ChatTemplate, FileTokenizer, special_tokens
from omni_cluster.types.errors import ConfigError

TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "description": "é <b>"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "<|im_end|> & 日本 'x'"}],
    "media": [
        {"role": "user", "content": [{"type": kind} for kind in ("audio", "image", "video")] + [PICTURE]},
        {"role": "assistant", "content": [{"type": "text", "text": "I see."}]},
        {"role": "user", "content": [{"type": "text", "text": "Do you?"}, {"type": "image"}]},
    ],
}
CALL = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_time", "arguments": {"a": 1}}}]}]
TRAINING = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ message.content | tojson }}{% endif %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ tools | tojson(indent=2) if tools }}
{%- if add_generation_prompt %}[{{ strftime_now('%Y') }}]{% endif %}"""


@cache
def processor(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def training(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's files around a template that uses all that templates may."""
    folder = tmp_path_factory.mktemp("training")
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "config.json"):
        (folder / name).symlink_to(tiny / name)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TRAINING}))
    return folder


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("which", ["tiny", "training"])
def test_a_conversation_renders_as_transformers_renders_it(
    request: pytest.FixtureRequest, which: str, kind: str, tools: list[dict[str, Any]]
) -> None:
    folder: Path = request.getfixturevalue(which)
    messages = [*CONVERSATIONS[kind], *CALL]
    rendered = ChatTemplate(folder).render(messages, tools)
    assert messages == [*CONVERSATIONS[kind], *CALL]
    assert rendered == processor(folder).apply_chat_template(
        json.loads(json.dumps(messages)), tools=tools or None, tokenize=False, add_generation_prompt=True
    )


def test_special_tokens_are_the_tokenizers(tiny: Path) -> None:
    named = processor(tiny).tokenizer.special_tokens_map
    assert {name: special_tokens(tiny)[name] for name in named} == named


@pytest.mark.parametrize(
    "text", ["", " Hello world,\n\tdescribe  it. 1234", "日本 é ﬁ 🙂\u200d\u0000", "<|im_start|>a<|im_end|>"]
)
@pytest.mark.parametrize("has_marks", [True, False])
def test_the_tokenizer_is_transformers(tiny: Path, text: str, has_marks: bool) -> None:
    theirs, ours = processor(tiny).tokenizer, FileTokenizer(tiny)
    ours.backend_tokenizer.encode_special_tokens = not has_marks
    assert ours.backend_tokenizer.encode(text).ids == theirs(text, split_special_tokens=not has_marks).input_ids
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder


def test_a_checkpoint_without_its_files_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat_template.jinja; use a checkpoint with a chat template"):
        ChatTemplate(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        FileTokenizer(tmp_path).backend_tokenizer  # noqa: B018
