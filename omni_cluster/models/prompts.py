"""A chat template around clients' text: what looks like a mark in that text, such as <|im_end|>, stays text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omni_cluster.types.inputs import Prompt

Objects = Sequence[Mapping[str, Any]]
Template = Callable[[Objects, Objects], str]
"""Of messages and tools, the text of the prompt."""
LONG_CHARS = 65_536
"""Tokens of longer prompts are counted here, so that one of too many is refused before any stage has it: an engine
reads all prompts in one thread, a megabyte in a second.
"""


class PromptMaker:
    """Prompts of one tokenizer. Its marks are those that it calls special: others, <tool_call> say, models write."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a fast one of transformers', whose backend is this object's from now on."""
        added = tokenizer.added_tokens_decoder.items()
        self._ids: dict[str, int] = {token.content: id_ for id_, token in added if token.special}
        longest_first = sorted(self._ids, key=len, reverse=True)  # as the tokenizer finds them
        self._marks = re.compile("({})".format("|".join(re.escape(mark) for mark in longest_first)))
        self._beginnings = tuple({mark[:n] for mark in self._ids for n in range(1, len(mark))})
        self._ends = tuple({mark[n:] for mark in self._ids for n in range(1, len(mark))})
        # Set once: threads share it, and a mark in text is never looked for.
        self._backend = tokenizer.backend_tokenizer
        self._backend.encode_special_tokens = True

    def render(self, template: Template, messages: Objects, tools: Objects) -> Prompt:
        """The prompt, with token ids if it is long, or has what looks like a mark and is none of the template's."""
        if not any(self._is_odd(text) for text in _strings([messages, tools])):
            return self._unmarked(template(messages, tools))
        guard = f"\ue000{secrets.token_hex(8)}\ue000"  # in no text of the prompt
        guarded = template(self._guarded(messages, guard), self._guarded(tools, guard))
        pieces = [piece.replace(guard, "") for piece in self._marks.split(guarded)]
        text = "".join(pieces)
        return Prompt(text, None if self._marks.split(text) == pieces else tuple(self._joined(pieces)))

    def _unmarked(self, text: str) -> Prompt:
        return Prompt(text, tuple(self.marked_ids(text)) if len(text) > LONG_CHARS else None)

    def ids(self, prompt: Prompt) -> Sequence[int]:
        """What an engine reads, but for media."""
        return self.marked_ids(prompt.text) if prompt.token_ids is None else prompt.token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Marks included; ids without text are left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; "" for an id without text."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def marked_ids(self, text: str) -> list[int]:
        """Of text whose marks are marks."""
        return self._joined(self._marks.split(text))

    def text_ids(self, text: str) -> list[int]:
        """Of text that has no marks, whatever it looks like."""
        return self._encoded([text])[0]

    def _joined(self, pieces: Sequence[str]) -> list[int]:
        """Ids of text and marks in turn, text first."""
        texts = self._encoded(pieces[::2])
        ids = texts[0]
        for mark, text in zip(pieces[1::2], texts[1:], strict=True):
            ids += [self._ids[mark], *text]
        return ids

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        # As a batch, because other threads run meanwhile only then.
        return [made.ids for made in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def _is_odd(self, text: str) -> bool:
        """Whether it may be read as a mark, alone or with what stands beside it."""
        return text.endswith(self._beginnings) or text.startswith(self._ends) or any(mark in text for mark in self._ids)

    def _guarded(self, node: Any, guard: str) -> Any:
        """The same with the guard wherever a mark would be read; templates that strip or compare text see no other."""
        if isinstance(node, str):
            return self._guarded_text(node, guard)
        if isinstance(node, Mapping):
            return {self._guarded(key, guard): self._guarded(value, guard) for key, value in node.items()}
        return [self._guarded(each, guard) for each in node] if isinstance(node, Sequence) else node

    def _guarded_text(self, text: str, guard: str) -> str:
        for mark in self._ids:
            while mark in text:  # again for marks that overlap
                text = text.replace(mark, f"{mark[0]}{guard}{mark[1:]}")
        before = guard if text.startswith(self._ends) else ""
        return before + text + (guard if text.endswith(self._beginnings) else "")


def _strings(node: Any) -> Iterator[str]:
    """All strings in it, however deep, keys among them."""
    nodes = [node]
    while nodes:
        found = nodes.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            nodes += [*found, *found.values()]
        elif isinstance(found, Sequence):
            nodes += found
