"""Sentences of a text are the same however it is cut into pieces."""

# ruff: noqa: RUF001 - marks of other scripts are meant
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_cluster.openai_api.sentences import Granularity, SentenceSplitter


def split(text: str, granularity: Granularity = "sentence") -> list[str]:
    splitter = SentenceSplitter(granularity)
    return [*splitter.push(text), *splitter.flush()]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n ", []),
        ("Good morning", ["Good morning"]),
        ("Good morning. How are you?", ["Good morning.", "How are you?"]),
        ('He said: "Go!" Then he left.', ['He said: "Go!"', "Then he left."]),
        ("It is 3.14 or 2,5. At example.org too.", ["It is 3.14 or 2,5.", "At example.org too."]),
        ("Dr. Smith saw J. R. Tolkien, e.g. here. Yes.", ["Dr. Smith saw J. R. Tolkien, e.g. here.", "Yes."]),
        ("No. I will not.", ["No.", "I will not."]),
        ("1. Buy milk.\n2. Go home.", ["1. Buy milk.", "2. Go home."]),
        ("A title\nA text", ["A title", "A text"]),
        ("Wait... what?! Well", ["Wait...", "what?!", "Well"]),
        ("One. ... Two.", ["One.", "... Two."]),
        ("今天很好。“你呢？”他说。", ["今天很好。", "“你呢？”", "他说。"]),
        ("नमस्ते। आप कैसे हैं", ["नमस्ते।", "आप कैसे हैं"]),
        ("?! ...", []),
    ],
)
def test_a_text_has_its_sentences(text: str, sentences: list[str]) -> None:
    assert split(text) == sentences


def test_clauses_end_at_commas_too_and_a_whole_text_nowhere() -> None:
    text = "First, 1,000 apples; then pears. Done."
    assert split(text, "clause") == ["First,", "1,000 apples;", "then pears.", "Done."]
    assert split(text, "none") == [text]


def test_a_sentence_is_there_with_its_end_and_a_quote_that_comes_later_begins_none() -> None:
    splitter = SentenceSplitter("sentence")
    assert splitter.push("Good morn") == [] and splitter.push("ing.") == []
    assert splitter.push(" How") == ["Good morning."] and splitter.rest == "How"
    assert splitter.push("\n你好。") == ["How", "你好。"]
    assert splitter.push("”然后。") == ["然后。"] and splitter.flush() == []


@given(st.text(alphabet='aB1 .!?,\n"。”', max_size=60), st.data())
def test_pieces_lose_no_letter_and_no_order(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    splitter = SentenceSplitter("sentence")
    said = [each for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for each in splitter.push(text[a:b])]
    said += splitter.flush()
    assert [c for c in "".join(said) if c.isalnum()] == [c for c in text if c.isalnum()]
    assert all(any(c.isalnum() for c in each) and each == each.strip() for each in said)
