"""Text that is kept to a structure: whole, beside neighbours, and when a request is begun again in its midst."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from omni_cluster.models.stage import Stage
from omni_cluster.types.errors import GrammarRefused, NotFinite, RequestError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import StageChunk
from tests.engine.stages import collect, request, until_free

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima"]},
        "note": {"type": "string", "maxLength": 5},
        "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "note", "days"],
    "additionalProperties": False,
}
MOST_TOKENS = 120
STRUCTURES: Mapping[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json as text": {"json": json.dumps(SCHEMA)},
    "regex": {"regex": "[ab]{3}-(yes|no)"},
    "choice": {"choice": ["first", "second"]},
    "grammar": {"grammar": 'root ::= "x" ("y" | "z") "!"'},
}


def kept_to(text: str, structure: dict[str, Any]) -> bool:
    ((kind, value),) = structure.items()
    if kind == "json":
        read = json.loads(text)
        assert read["city"] in ("Oslo", "Lima") and len(read["note"]) <= 5 and len(read["days"]) <= 2
        return set(read) == set(SCHEMA["required"])
    if kind == "choice":
        return text in value
    return re.fullmatch(value if kind == "regex" else "x[yz]!", text) is not None


def structured(name: str, structure: dict[str, Any], **sampling: Any) -> OmniRequest:
    asked = {"structured_outputs": structure, "max_tokens": MOST_TOKENS, **sampling}
    return request(name, sampling={"thinker": asked})


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "seeded"])
async def test_a_text_is_kept_to_its_structure(tight_thinker: Stage, name: str, sampling: dict[str, Any]) -> None:
    structure = STRUCTURES[name]
    made = await collect(tight_thinker.generate(structured(f"{name}-{len(sampling)}", structure, **sampling)))
    assert made.finish_reason == "stop" and kept_to(made.text, structure)


async def test_beside_neighbours_and_alone(tight_thinker: Stage) -> None:
    asked = [structured(f"alone-{name}", each) for name, each in STRUCTURES.items()] + [request("alone-any")]
    alone = [await collect(tight_thinker.generate(each)) for each in asked]
    renamed = [structured(f"beside-{name}", each) for name, each in STRUCTURES.items()] + [request("beside-any")]
    beside = await asyncio.gather(*(collect(tight_thinker.generate(each)) for each in renamed))
    assert [made.token_ids for made in beside] == [made.token_ids for made in alone]
    await until_free(tight_thinker)


@pytest.mark.parametrize("name", ["json", "regex", "choice"])
async def test_begun_again_it_is_the_same(tight_thinker: Stage, name: str) -> None:
    """Behind each of its tokens, the end token among them."""
    sampling = {"structured_outputs": STRUCTURES[name], "max_tokens": MOST_TOKENS, "temperature": 0.8, "seed": 4}
    whole = await collect(tight_thinker.generate(request(f"{name}-whole", sampling={"thinker": sampling})))
    most = len(whole.token_ids)
    for cut in {1, 2, most // 2, most - 1, most}:
        known = KnownOutput(whole.token_ids[:cut], whole.finish_reason if cut == most else None)
        again = request(f"{name}-{cut}", sampling={"thinker": sampling}, known={"thinker": known})
        made = await collect(tight_thinker.generate(again))
        assert (made.token_ids, made.finish_reason) == (whole.token_ids, "stop")
        assert whole.text.endswith(made.text)
    await until_free(tight_thinker)


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(a"},
        {"grammar": "root ::= unknown_rule"},
        {"json": {"$ref": "#/$defs/none"}},
        {"json": {"type": "string", "pattern": "(("}},
        {"json": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
        {"structural_tag": '{"type": "none"}'},
        {"choice": []},
    ],
)
async def test_what_cannot_be_kept_takes_no_step(tight_thinker: Stage, structure: dict[str, Any]) -> None:
    steps = (await tight_thinker.counts())["steps"]
    with pytest.raises(GrammarRefused) as caught:
        await collect(tight_thinker.generate(structured(f"none-{structure}", structure)))
    assert "xgrammar" not in str(caught.value) and str(caught.value).endswith(".")
    assert (await tight_thinker.counts())["steps"] == steps
    await until_free(tight_thinker)


@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= "a" none\nnone ::= none'], ids=["at once", "later"])
async def test_a_dead_end_ends_its_own_request(tight_thinker: Stage, grammar: str) -> None:
    for sampling in ({}, {"temperature": 1.0, "seed": 1}):
        with pytest.raises((GrammarRefused, NotFinite)):
            await collect(tight_thinker.generate(structured(f"end-{grammar}", {"grammar": grammar}, **sampling)))
    await until_free(tight_thinker)


@pytest.mark.parametrize(
    ("beside", "name"),
    [({"min_tokens": 3}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos"), ({"bad_words": ["a"]}, "bad_words")],
)
async def test_what_would_forbid_its_only_token_is_refused(
    tight_thinker: Stage, beside: dict[str, Any], name: str
) -> None:
    asked = structured("beside", {"regex": "a"}, **beside)
    with pytest.raises(RequestError, match=f"{name} and structured_outputs of stage thinker are both given"):
        tight_thinker.check(asked)


async def test_a_limit_ends_it_before_its_end(tight_thinker: Stage) -> None:
    made: StageChunk = await collect(tight_thinker.generate(structured("cut", STRUCTURES["json"], max_tokens=3)))
    assert (made.finish_reason, len(made.token_ids)) == ("length", 3)
