"""A checkpoint's chat template and tokenizer, from its files: transformers, which reads them too, imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omni_cluster.types.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

Objects = Sequence[Mapping[str, Any]]

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
"""Where transformers looks for a processor's template, the first that is there."""


class _Generation(Extension):
    """The mark around what the model said, which templates for training have: here it says nothing."""

    tags = {"generation"}  # noqa: RUF012 - typed so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """The text of a conversation, as `apply_chat_template` of the checkpoint's processor in transformers gives it."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a checkpoint without a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = environment.from_string(_template_text(folder))
        self._special_tokens = special_tokens(folder)

    def render(self, messages: Objects, tools: Objects = ()) -> str:
        """With the words that ask for a reply."""
        return self._template.render(
            messages=[_plain(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
        )


class FileTokenizer:
    """The checkpoint's `tokenizer.json`, under the names that transformers' fast tokenizers have for its parts."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        """Raises ConfigError."""
        from tokenizers import Tokenizer

        if not self._file.is_file():
            raise ConfigError(f"model {self._file.parent} has no {self._file.name}; use a checkpoint that has it.")
        return Tokenizer.from_file(str(self._file))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that the tokenizer's configuration has names for, such as `eos_token`."""
    entries = _json(folder / "tokenizer_config.json").items()
    named = {name: value for name, value in entries if name.endswith("_token")}
    contents = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _template_text(folder: Path) -> str:
    raw, wrapped = (folder / name for name in TEMPLATE_FILES)
    if raw.is_file():
        return raw.read_text(encoding="utf-8")
    if wrapped.is_file():
        return str(_json(wrapped)["chat_template"])
    raise ConfigError(f"model {folder} has no {TEMPLATE_FILES[0]}; use a checkpoint with a chat template.")


def _json(file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return fields


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Pictures by transformers' name for them, which templates of its own expect."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_plain_part(part) for part in content]}


def _plain_part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url" or "image_url" not in part:
        return part
    address = part["image_url"]
    return {"type": "image", "url": address.get("url", "") if isinstance(address, dict) else address}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what HTML does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
