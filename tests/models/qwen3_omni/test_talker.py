"""The talker's input is what transformers makes of the same reply, however the thinker's output comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import EngineInput
from omni_cluster.models.qwen3_omni.checkpoint_tokens import id_of
from omni_cluster.models.qwen3_omni.fine_positions import as_floats
from omni_cluster.models.qwen3_omni.talker import TalkerSession
from omni_cluster.models.qwen3_omni.talker_ids import CodecIds, TalkerIds, TextIds
from omni_cluster.models.qwen3_omni.talker_model import Qwen3OmniTalker
from omni_cluster.models.qwen3_omni.talker_prompt import talker_positions
from omni_cluster.models.qwen3_omni.talker_stage import Talker
from omni_cluster.models.qwen3_omni.user_positions import user_positions
from omni_cluster.models.qwen3_omni.voices import voice_id, voice_ids
from omni_cluster.models.thinkers.media_places import Grid, Place
from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import PayloadError, RequestError, TokenError
from omni_cluster.types.inputs import KnownOutput, OmniRequest
from omni_cluster.types.outputs import CallDelta, StageChunk
from omni_cluster.types.rows import IDS, PrefixHashes, Rows, check_together
from omni_cluster.types.tool_use import ToolUse
from tests.engine.stages import at_once
from tests.models.qwen3_omni.spoken import KINDS, Speaker
from tests.models.qwen3_omni.stages import Checkpoint

TEXT = TextIds(im_start=1, user=2, assistant=3, pad=4, bos=5, eos=6, media=(7, 8, 9), num_ids=50)
CODEC = CodecIds(
    nothink=101, think_bos=102, think_eos=103, pad=104, bos=105, eos=106, unspoken=199, num_codes=100
)  # fmt: skip
VOICE = 150
NEWLINE, CALL = 10, 11
PROMPT = (1, 2, NEWLINE, 20, 1, 3, NEWLINE)
"""A turn of the user of one word, and the beginning of the answer."""
BEGINNING = [1, 2, NEWLINE, 20, 1, 3, NEWLINE, 4, 4, 4, 4, 5]


def session(
    *chunks: StageChunk, request: OmniRequest | None = None, ids: TalkerIds | None = None, voice: int = VOICE
) -> TalkerSession:
    asked = request or OmniRequest("r", "")
    return TalkerSession(asked, at_once(list(chunks)), ids or TalkerIds(TEXT, CODEC), voice, call_mark=CALL)


def said(start: int, *tokens: int, finish_reason: str | None = None, prompt: Sequence[int] = PROMPT) -> StageChunk:
    return StageChunk(start, tokens, prompt_token_ids=None if start else tuple(prompt), finish_reason=finish_reason)


async def prompt_of(talker: TalkerSession) -> EngineInput:
    made = await talker.prompt()
    assert made is not None
    check_together(made.rows, max_elements=1 << 20)
    return made


def ids_of(rows: Sequence[Rows]) -> list[int]:
    assert {part.kind for part in rows} <= {IDS}
    return [int(i) for part in rows for i in part.tensor().flatten()]


async def later(talker: TalkerSession) -> list[tuple[list[int], bool]]:
    return [(ids_of([each.rows]), each.complete) async for each in talker.later_rows()]


# ------------------------------------------------------------ transformers' own


@pytest.fixture(scope="module")
def speaker(qwen3_reference: Any, qwen3_folder: Path) -> Speaker:
    return Speaker(qwen3_reference, qwen3_folder)


@pytest.fixture(scope="module")
def config(qwen3_folder: Path) -> dict[str, Any]:
    return read_config(qwen3_folder)


@torch.inference_mode()
def sides(model: Any, ids: TalkerIds, rows: Sequence[Rows], prompt_ids: Sequence[int]) -> torch.Tensor:
    """Text and codec sides of positions, added, by the reference's own weights."""
    talker, embed = model.talker, model.thinker.get_input_embeddings()
    text = torch.cat(
        [
            talker.text_projection(embed(part.tensor()[:, 0])) if part.kind == IDS
            else talker.hidden_projection(part.tensor())
            for part in rows
        ]
    )  # fmt: skip
    tokens = torch.tensor(prompt_ids)
    codec = talker.get_input_embeddings()(tokens) * (tokens != ids.codec.unspoken)[:, None]
    return text[: len(tokens)] + codec


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("voice", ["Ethan", "chelsie"])
@pytest.mark.parametrize("kind", KINDS)
async def test_rows_and_positions_are_transformers(
    speaker: Speaker, config: dict[str, Any], kind: str, voice: str
) -> None:
    spoken, ids = speaker.speak(kind, voice), TalkerIds.from_config(config)
    talker = session(*spoken.chunks(), ids=ids, voice=voice_id(voice_ids(config), voice))
    made = await prompt_of(talker)
    prompt_ids = made.prompt["prompt_token_ids"]
    assert_same(sides(speaker.model, ids, made.rows, prompt_ids), spoken.embeds)
    positions = made.rows[0].positions
    assert positions is not None and np.array_equal(as_floats(positions), spoken.positions)
    delta = Qwen3OmniTalker.position_delta(torch.from_numpy(positions))
    assert as_floats(delta + positions.shape[1]) == spoken.following
    stream = [token for tokens, _ in await later(talker) for token in tokens]
    embed = speaker.model.thinker.get_input_embeddings()
    with torch.inference_mode():
        assert_same(speaker.model.talker.text_projection(embed(torch.tensor(stream))), spoken.stream)
        assert made.pad_row is not None
        pad = embed(made.pad_row.tensor()[0, 0])
        assert_same(speaker.model.talker.text_projection(pad), spoken.pad)


async def test_rows_of_media_that_come_in_parts_are_the_same(speaker: Speaker, config: dict[str, Any]) -> None:
    spoken, ids = speaker.speak("turns"), TalkerIds.from_config(config)
    rows = spoken.rows()
    rests = [rows.after(at) for at in range(0, rows.end, 13)]
    parts = [rest.before(rest.start + 13) for rest in rests if rest is not None]
    assert len(parts) > 5
    chunks = [*(StageChunk(rows=part) for part in parts), replace(spoken.chunks()[0], rows=None), *spoken.chunks()[1:]]
    made = await prompt_of(session(*chunks, ids=ids, voice=config["talker_config"]["speaker_id"]["ethan"]))
    assert_same(sides(speaker.model, ids, made.rows, made.prompt["prompt_token_ids"]), spoken.embeds)
    assert made.rows[0].positions is not None
    assert np.array_equal(as_floats(made.rows[0].positions), spoken.positions)


async def test_a_reply_without_rows_counts_its_positions(speaker: Speaker, config: dict[str, Any]) -> None:
    spoken = speaker.speak("text")
    first = replace(spoken.chunks()[0], rows=None)
    made = await prompt_of(session(first, *spoken.chunks()[1:], ids=TalkerIds.from_config(config)))
    assert made.rows[0].positions is None
    assert (spoken.positions == np.arange(len(spoken.embeds))).all() and spoken.following == len(spoken.embeds)


@pytest.mark.parametrize("missing", ["the last", "all"])
async def test_media_without_all_of_their_rows_are_refused(
    speaker: Speaker, config: dict[str, Any], missing: str
) -> None:
    spoken = speaker.speak("image")
    last = int(np.flatnonzero(spoken.is_media)[-1])
    cut = spoken.rows().before(last if missing == "the last" else 3)
    chunks = [replace(spoken.chunks()[0], rows=cut), *spoken.chunks()[1:]]
    with pytest.raises(PayloadError, match=r"Media at \d+ to \d+ of a prompt have (5|0) hidden states; each of the 6"):
        await session(*chunks, ids=TalkerIds.from_config(config)).prompt()


async def test_rows_of_media_with_a_gap_are_refused(speaker: Speaker, config: dict[str, Any]) -> None:
    spoken = speaker.speak("image")
    rows = spoken.rows()
    first, rest = rows.before(9), rows.after(11)
    chunks = [StageChunk(rows=first), replace(spoken.chunks()[0], rows=rest), *spoken.chunks()[1:]]
    with pytest.raises(
        PayloadError, match="There is a gap between hidden states that end at 9 and those that start at 11"
    ):
        await session(*chunks, ids=TalkerIds.from_config(config)).prompt()


# ------------------------------------------------------------ tokens as they come


async def test_prompt_is_the_users_turns_and_nine_positions_of_the_answer() -> None:
    made = await prompt_of(session(said(0, 30)))
    assert made.prompt["prompt_token_ids"] == [199] * 7 + [101, 102, 103, VOICE, 104, 105]
    assert ids_of(made.rows) == [*BEGINNING, 30]
    assert not made.rows_complete and not made.is_part


async def test_other_turns_are_left_out() -> None:
    asked, answered = (1, 2, NEWLINE, 20), (1, 3, NEWLINE, 21)
    prompt = (1, 12, NEWLINE, 22, *asked, *answered, *asked, 1, 3, NEWLINE)
    made = await prompt_of(session(said(0, 30, prompt=prompt)))
    assert ids_of(made.rows) == [*asked, *BEGINNING, 30]


async def test_a_turn_that_is_gone_on_with_is_spoken_from_its_beginning() -> None:
    talker = session(said(0, 30, prompt=(*PROMPT, 28, 29)), said(1, 31, finish_reason="stop"))
    assert ids_of((await prompt_of(talker)).rows) == [*BEGINNING, 28, 29]
    assert await later(talker) == [([30, 6], True)]


CUTS = range(1, 5)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("cuts", [cuts for n in range(4) for cuts in combinations(CUTS, n)])
async def test_however_a_reply_is_cut_its_last_token_is_not_spoken(cuts: tuple[int, ...], twice: bool) -> None:
    """The reply is 30, 31, 32, 33, 34, whose end comes with the last token or behind it."""
    chunks = [said(start, *range(30 + start, 30 + end)) for start, end in pairwise([0, *cuts, 5])]
    chunks = [each for chunk in chunks for each in [chunk] * (1 + twice)]
    ends = ([*chunks[:-1], replace(chunks[-1], finish_reason="stop")], [*chunks, StageChunk(5, finish_reason="stop")])
    for reply in ends:
        talker = session(*reply)
        made = await prompt_of(talker)
        rest = [] if made.rows_complete else await later(talker)
        assert ids_of(made.rows) + [i for ids, _ in rest for i in ids] == [*BEGINNING, 30, 31, 32, 33, 6]
        assert [complete for _, complete in rest] == [*[False] * (len(rest) - 1), True][: len(rest)]


async def test_a_token_is_spoken_once_another_one_follows_it() -> None:
    talker = session(said(0, 30), said(1, 31), said(2, 32), said(3, 33, 34), said(5, 35, finish_reason="length"))
    assert ids_of((await prompt_of(talker)).rows)[-1] == 30
    assert await later(talker) == [([31], False), ([32, 33], False), ([34, 6], True)]


@pytest.mark.parametrize(
    "chunks",
    [[], [said(0)], [said(0, finish_reason="stop")], [said(0, 30, finish_reason="length")], [StageChunk(0, (30,))]],
)
async def test_a_reply_of_fewer_than_two_tokens_is_not_spoken(chunks: list[StageChunk]) -> None:
    assert await session(*chunks).prompt() is None


async def test_a_reply_that_turns_out_to_have_one_token_never_completes() -> None:
    talker = session(said(0, 30), StageChunk(1, finish_reason="stop"))
    assert ids_of((await prompt_of(talker)).rows)[-1] == 30
    assert await later(talker) == []


async def test_what_another_engine_had_said_comes_ahead_of_the_prompt() -> None:
    talker = session(StageChunk(0, (30, 31)), replace(said(0), token_start=2), said(2, 32, finish_reason="stop"))
    assert ids_of((await prompt_of(talker)).rows) == [*BEGINNING, 30]
    assert await later(talker) == [([31, 6], True)]


async def test_a_given_reply_is_spoken_whole() -> None:
    given = said(0, 30, 31, finish_reason="stop")
    made = await prompt_of(session(given, request=OmniRequest("r", "", reply="said")))
    assert ids_of(made.rows) == [*BEGINNING, 30, 31, 6] and made.rows_complete


USE = ToolUse(({"type": "function", "function": {"name": "f"}},))


@pytest.mark.parametrize(
    "chunks",
    [
        [said(0, 30), said(1, 31), said(2, CALL), said(3, 32, finish_reason="stop")],
        [said(0, 30, 31), said(2, CALL, 32), said(4, 33, finish_reason="stop")],
        [said(0, 30, 31), replace(said(2, 40), calls=(CallDelta(0, "id", "f"),)), said(3, 33, finish_reason="stop")],
    ],
)
async def test_calls_are_not_spoken_and_what_is_before_them_ends_at_once(chunks: list[StageChunk]) -> None:
    talker = session(*chunks, request=OmniRequest("r", "", tool_use=USE))
    made = ids_of((await prompt_of(talker)).rows) + [i for ids, _ in await later(talker) for i in ids]
    assert made == [*BEGINNING, 30, 31, 6]


async def test_a_reply_of_calls_alone_is_not_spoken() -> None:
    chunks = [said(0, CALL), said(1, 32), said(2, 33, finish_reason="stop")]
    assert await session(*chunks, request=OmniRequest("r", "", tool_use=USE)).prompt() is None
    must = ToolUse(USE.tools, must_call=True)
    other = [said(0, 31), *chunks[1:]]
    assert await session(*other, request=OmniRequest("r", "", tool_use=must)).prompt() is None


async def has_nothing(prefix: PrefixHashes) -> int:
    return 0


async def test_the_mark_of_a_call_is_the_tokenizers(config: dict[str, Any], qwen3_folder: Path) -> None:
    text = TalkerIds.from_config(config).text
    reply = said(0, 30, 31, id_of("<tool_call>"), 32, prompt=(text.im_start, text.assistant, NEWLINE))
    request = OmniRequest("r", "", tool_use=USE)
    talker = Talker(Checkpoint(qwen3_folder)).session(request, at_once([reply]), has_nothing)
    made = await talker.prompt()
    assert made is not None and ids_of(made.rows)[-3:] == [30, 31, text.eos]


async def test_without_tools_the_mark_of_a_call_is_a_token_as_others_are() -> None:
    made = await prompt_of(session(said(0, 30, CALL, 31, finish_reason="stop")))
    assert ids_of(made.rows) == [*BEGINNING, 30, CALL, 6]


async def test_codes_that_are_known_need_rows_before_the_first_new_one() -> None:
    known = {"talker": KnownOutput(codes=Codes.of(0, [[1, 2]]))}
    made = await prompt_of(session(said(0, 30), request=OmniRequest("r", "", known=known)))
    assert made.is_part
    whole = {"talker": KnownOutput(finish_reason="stop", codes=Codes.of(0, [[1, 2]]))}
    ended = TalkerSession(OmniRequest("r", "", known=whole), None, TalkerIds(TEXT, CODEC), VOICE)
    assert await ended.prompt() is None and await later(ended) == []


async def test_a_prompt_without_a_turn_of_the_assistant_is_refused() -> None:
    with pytest.raises(RequestError, match="begins no turn of the assistant, so nothing can be spoken; end it with"):
        await session(said(0, 30, prompt=(1, 2, NEWLINE, 20))).prompt()


@pytest.mark.parametrize("chunk", [said(0, 30, 50), said(0, -1), said(0, 30, prompt=(*PROMPT[:4], 51, *PROMPT[4:]))])
async def test_a_token_that_the_thinker_has_not_is_refused(chunk: StageChunk) -> None:
    with pytest.raises(TokenError, match=r"token (50|-1|51) is none of the thinker's; they are 0 to 49\."):
        await session(chunk).prompt()


async def test_an_upstream_that_breaks_says_so() -> None:
    async def broken() -> AsyncIterator[StageChunk]:
        yield said(0, 30)
        raise PayloadError("the thinker's output is damaged.")

    talker = TalkerSession(OmniRequest("r", ""), broken(), TalkerIds(TEXT, CODEC), VOICE)
    await prompt_of(talker)
    with pytest.raises(PayloadError, match="damaged"):
        await later(talker)


TURN = [1, 2, 30, NEWLINE]
"""Of the user, with one word."""
SEEN = [1, 2, 40, 8, 8, 8, 8, 41, NEWLINE]
"""The same with a picture of two rows and columns, between its marks."""


def test_each_turn_of_the_user_follows_the_one_before_it() -> None:
    """Neither turns of others are counted, nor media of theirs."""
    others, header = [1, 3, 20, NEWLINE], [1, 3, NEWLINE]
    prompt = [*others, *TURN, *others, *SEEN, *header]
    places = [Place(offset, 4, Grid(1, 2, 2)) for offset in (2, prompt.index(8))]
    made = user_positions(prompt, places, TEXT, ticks_per_second=13.0)
    seen = {0: [4, 5, 6, 7, 7, 7, 7, 9, 10], 1: [4, 5, 6, 7, 7, 8, 8, 9, 10], 2: [4, 5, 6, 7, 8, 7, 8, 9, 10]}
    for axis, of_seen in seen.items():
        assert made[axis].tolist() == [0] * 4 + [0, 1, 2, 3] + [0] * 4 + of_seen + [0] * 3
    of_users, is_media = made[:, [*range(4, 8), *range(12, 21)]], np.array([False] * 7 + [True] * 4 + [False] * 2)
    assert talker_positions(of_users, is_media, following=3)[:, 13:].tolist() == [[11, 12, 13]] * 3


def test_positions_behind_media_at_the_end_go_on_behind_the_largest() -> None:
    of_users = np.array([[0, 1, 1.5], [0, 1, 7.25], [0, 1, 3]], np.float32)
    made = talker_positions(of_users, np.array([False, True, True]), following=2)
    assert made[:, 3:].tolist() == [[8.25, 9.25]] * 3


def test_positions_without_a_turn_of_the_user_begin_at_zero() -> None:
    made = talker_positions(np.zeros((3, 0), np.float32), np.zeros(0, np.bool_), following=2)
    assert made.tolist() == [[0, 1]] * 3


async def test_stops_are_codes_and_not_text() -> None:
    made = await prompt_of(session(said(0, 30)))
    assert made.sampling == {"stop_token_ids": [106], "ignore_eos": True, "detokenize": False}


def test_the_reference_speaks_otherwise_of_other_media_and_in_another_voice(speaker: Speaker) -> None:
    """Else equal codes would show nothing."""
    all_of_them = [speaker.speak(kind) for kind in KINDS] + [speaker.speak("text", "chelsie")]
    assert all(one.frames != other.frames for one, other in combinations(all_of_them, 2))
