from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import EngineInput, Hold, StreamInterval
from omni_cluster.models.qwen2_5_omni import talker as talker_module
from omni_cluster.models.qwen2_5_omni.special_ids import SpecialIds
from omni_cluster.models.qwen2_5_omni.stages import stream_interval
from omni_cluster.models.qwen2_5_omni.talker import TalkerSession, TextEmbeddings, talker_positions
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.types.inputs import OmniRequest
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import PrefixHashes, Rows, check_together
from tests.engine.stages import Speak, at_once
from tests.reference import Reference, media, prompt_text
from tests.rows import rows_of

WIDTH = 3
PROMPT = 4
POSITIONS = torch.arange(PROMPT).expand(3, -1).contiguous()
EOS, PAD, CHELSIE, ETHAN = (torch.full((WIDTH,), value) for value in (-1.0, -2.0, -3.0, -4.0))
EMBEDDINGS = TextEmbeddings(EOS, PAD, {"Chelsie": CHELSIE, "Ethan": ETHAN})
STREAM_INTERVAL = StreamInterval(24, 12, 24, 144)
IDS = SpecialIds(
    codec_pad=92, codec_bos=93, codec_eos=94, codec_mask=96, text_pad=1, text_eos=2, num_codes=80
)  # fmt: skip


def rows(start: int, end: int) -> Rows:
    """Rows whose every element is their position; the prompt's positions with the first."""
    values = torch.arange(start, end, dtype=torch.float32)[:, None].repeat(1, WIDTH)
    return rows_of(start, values, POSITIONS if start == 0 else None)


def chunk(start: int, end: int, finish_reason: str | None = None) -> StageChunk:
    return StageChunk(rows=rows(start, end), finish_reason=finish_reason)


async def has_nothing(prefix: PrefixHashes) -> int:
    return 0


def session(*chunks: StageChunk, voice: str = "Chelsie", hold: Hold = has_nothing) -> TalkerSession:
    return TalkerSession(OmniRequest("r", ""), at_once(list(chunks)), IDS, EMBEDDINGS, voice, STREAM_INTERVAL, hold)


async def prompt_of(talker: TalkerSession) -> EngineInput:
    made = await talker.prompt()
    assert made is not None
    return made


def prompt_rows(made: EngineInput) -> list[float]:
    check_together(made.rows, max_elements=1000)
    tensor = torch.cat([part.tensor() for part in made.rows])
    assert torch.equal(tensor, tensor[:, :1].expand(-1, WIDTH))
    values: list[float] = tensor[:, 0].tolist()
    return values


async def later(talker: TalkerSession) -> list[tuple[list[float], bool]]:
    return [(each.rows.tensor()[:, 0].tolist(), each.complete) async for each in talker.later_rows()]


async def test_prompt_is_the_thinkers_rows_then_the_voice_then_the_replys_first_row() -> None:
    made = await prompt_of(session(chunk(0, 6), chunk(6, 7)))
    assert made.prompt["prompt_token_ids"] == [96, 96, 96, 96, 92, 93]
    assert prompt_rows(made) == [0, 1, 2, 3, -3, 4, 5]
    assert not made.rows_complete


@pytest.mark.parametrize(("voice", "row"), [("Chelsie", -3), ("Ethan", -4)])
async def test_voice_row_is_the_requests_voice(voice: str, row: float) -> None:
    made = await prompt_of(session(chunk(0, 5), voice=voice))
    assert prompt_rows(made)[PROMPT] == row


async def test_replys_rows_follow_one_by_one_and_eos_ends_them_once() -> None:
    talker = session(chunk(0, 4), chunk(4, 5), chunk(5, 6), chunk(6, 8), StageChunk(finish_reason="stop"))
    assert prompt_rows(await prompt_of(talker)) == [0, 1, 2, 3, -3, 4]
    assert await later(talker) == [([5], False), ([6, 7], False), ([-1], True)]


async def test_rows_that_came_with_the_first_of_the_reply_are_in_the_prompt_and_not_again_later() -> None:
    talker = session(chunk(0, 7), chunk(7, 8), StageChunk(finish_reason="length"))
    assert prompt_rows(await prompt_of(talker)) == [0, 1, 2, 3, -3, 4, 5, 6]
    assert await later(talker) == [([7], False), ([-1], True)]


async def test_reply_that_ended_already_brings_its_eos_with_it() -> None:
    made = await prompt_of(session(chunk(0, 6, finish_reason="stop")))
    assert prompt_rows(made) == [0, 1, 2, 3, -3, 4, 5, -1]
    assert made.rows_complete


async def test_pad_row_is_the_text_pads_embedding() -> None:
    made = await prompt_of(session(chunk(0, 5)))
    assert made.pad_row is not None and torch.equal(made.pad_row.tensor(), PAD[None])
    assert np.array_equal(made.rows[0].positions, np.tile(np.arange(PROMPT + 2), (3, 1)))


ENDS = range(1, PROMPT + 3)


@pytest.mark.parametrize("ends", [ends for n in range(4) for ends in combinations(ENDS, n)])
async def test_however_a_prompt_and_its_reply_are_cut_into_chunks_the_rows_are_the_same(ends: tuple[int, ...]) -> None:
    pieces = [chunk(start, end) for start, end in pairwise([0, *ends, PROMPT + 3])]
    talker = session(*pieces, StageChunk(finish_reason="stop"))
    made = await prompt_of(talker)
    assert made.prompt["prompt_token_ids"] == [96, 96, 96, 96, 92, 93]
    later_rows = await later(talker)
    assert prompt_rows(made) + [row for rows, _ in later_rows for row in rows] == [0, 1, 2, 3, -3, 4, 5, 6, -1]
    assert [complete for _, complete in later_rows] == [False] * (len(later_rows) - 1) + [True]


@pytest.mark.parametrize("part_rows", range(1, PROMPT + 4))
@pytest.mark.parametrize("ended", [False, True])
async def test_rows_that_come_at_once_are_handed_on_in_parts(
    monkeypatch: pytest.MonkeyPatch, part_rows: int, ended: bool
) -> None:
    monkeypatch.setattr(talker_module, "PART_ROWS", part_rows)
    talker = session(chunk(0, PROMPT + 3, finish_reason="stop" if ended else None))
    made = await prompt_of(talker)
    parts = [prompt_rows(made)] + ([] if made.rows_complete else [rows for rows, _ in await later(talker)])
    assert [row for part in parts for row in part] == [0, 1, 2, 3, -3, 4, 5, 6, -1]
    # A part that ends where the prompt does waits for the reply's first row.
    assert all(len(part) <= (2 if part_rows == PROMPT else 1) * part_rows + 2 for part in parts)
    assert made.is_part == (part_rows < PROMPT)


async def test_a_given_reply_is_told_from_its_prompt_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker_module, "PART_ROWS", 2)
    given = StageChunk(token_ids=(7, 8), rows=rows(0, 5), finish_reason="stop")
    request = OmniRequest("r", "", reply="said")
    talker = TalkerSession(request, at_once([given]), IDS, EMBEDDINGS, "Chelsie", STREAM_INTERVAL, has_nothing)
    made = await prompt_of(talker)
    assert made.prompt["prompt_token_ids"] == [96, 96, 92, 93]
    assert prompt_rows(made) + [row for part, _ in await later(talker) for row in part] == [0, 1, -3, 2, 3, 4, -1]


HASHES = tuple(bytes([i]) * 32 for i in range(PROMPT))


@dataclass
class Engine:
    """One that has the first `has` positions of a prompt in blocks of one position each. `asked`: up to which."""

    has: int
    asked: list[int] = field(default_factory=list)

    async def hold(self, prefix: PrefixHashes) -> int:
        assert prefix.hashes == HASHES[: len(prefix.hashes)]
        self.asked.append(len(prefix.hashes))
        return min(self.has, len(prefix.hashes))


def left_out(start: int, end: int, finish_reason: str | None = None) -> StageChunk:
    """The first chunk of a prompt whose rows up to `start` were told before."""

    async def earlier(first: int) -> AsyncGenerator[Rows, None]:
        for position in range(first, start):
            yield rows(position, position + 1).without_facts()

    first = rows_of(start, rows(start, end).tensor(), POSITIONS, prefix=PrefixHashes(1, HASHES), earlier=earlier)
    return StageChunk(rows=first, finish_reason=finish_reason)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("end", range(3, PROMPT + 3))
@pytest.mark.parametrize("has", range(5))
@pytest.mark.parametrize("part_rows", [1, 2, 10])
async def test_rows_that_were_left_out_are_asked_for_as_far_as_the_engine_lacks_them(
    monkeypatch: pytest.MonkeyPatch, part_rows: int, has: int, end: int, ended: bool
) -> None:
    monkeypatch.setattr(talker_module, "PART_ROWS", part_rows)
    engine = Engine(has)
    chunks = [left_out(2, end), chunk(end, PROMPT + 3, "stop")]
    if ended:
        chunks = [left_out(2, PROMPT + 3, "stop")]
    talker = session(*chunks, hold=engine.hold)
    made = await prompt_of(talker)
    parts = [prompt_rows(made)] + ([] if made.rows_complete else [part for part, _ in await later(talker)])
    assert made.prompt["prompt_token_ids"] == [96, 96, 96, 96, 92, 93]
    assert (engine.asked, made.rows[0].start) == ([2], min(has, 2))
    assert [row for part in parts for row in part] == [0, 1, 2, 3, -3, 4, 5, 6, -1][made.rows[0].start :]
    assert made.rows[0].prefix == PrefixHashes(1, HASHES)


async def test_of_a_given_reply_that_was_told_before_the_engine_is_asked_for_the_prompt_alone() -> None:
    engine, given = Engine(has=4), msgspec.structs.replace(left_out(3, 5, "stop"), token_ids=(7, 8))
    request = OmniRequest("r", "", reply="said")
    talker = TalkerSession(request, at_once([given]), IDS, EMBEDDINGS, "Chelsie", STREAM_INTERVAL, engine.hold)
    made = await prompt_of(talker)
    assert (engine.asked, made.rows[0].start, made.rows[0].prefix) == ([2], 2, PrefixHashes(1, HASHES[:2]))
    assert prompt_rows(made) + [row for part, _ in await later(talker) for row in part] == [-3, 2, 3, 4, -1]


async def test_a_prompt_of_which_nothing_was_left_out_asks_for_nothing() -> None:
    engine, first = Engine(has=4), rows_of(0, rows(0, 6).tensor(), POSITIONS, prefix=PrefixHashes(1, HASHES))
    made = await prompt_of(session(StageChunk(rows=first), hold=engine.hold))
    assert (engine.asked, made.rows[0].start, made.rows[0].prefix) == ([], 0, PrefixHashes(1, HASHES))
    assert prompt_rows(made) == [0, 1, 2, 3, -3, 4, 5]


async def test_rows_that_come_twice_are_dropped() -> None:
    talker = session(chunk(0, 3), chunk(0, 5), chunk(3, 5), chunk(4, 7), chunk(5, 6))
    assert prompt_rows(await prompt_of(talker)) == [0, 1, 2]
    assert await later(talker) == [([3], False), ([-3], False), ([4], False), ([5, 6], False), ([-1], True)]


async def test_chunks_without_rows_change_nothing() -> None:
    talker = session(StageChunk(text="a"), chunk(0, 4), StageChunk(text="b"), chunk(4, 5), StageChunk(text="c"))
    assert prompt_rows(await prompt_of(talker)) == [0, 1, 2, 3, -3, 4]
    assert await later(talker) == [([-1], True)]


@pytest.mark.parametrize("chunks", [[], [StageChunk(finish_reason="stop")], [chunk(0, 4, finish_reason="stop")]])
async def test_reply_without_a_row_of_its_own_is_not_spoken(chunks: Sequence[StageChunk]) -> None:
    assert await session(*chunks).prompt() is None


async def test_a_prompt_whose_reply_turns_out_to_have_no_row_never_completes() -> None:
    talker = session(chunk(0, 2), chunk(2, 4, finish_reason="stop"))
    assert prompt_rows(await prompt_of(talker)) == [0, 1]
    assert await later(talker) == [([2, 3], False)]


async def test_stops_are_codes_and_not_text() -> None:
    made = await prompt_of(session(chunk(0, 5)))
    assert made.sampling == {"stop_token_ids": [92, 94], "ignore_eos": True, "detokenize": False}
    assert made.stream_interval == STREAM_INTERVAL


@pytest.mark.parametrize("handed_on", range(24))
def test_no_code_of_code2wavs_first_piece_waits_for_one_behind_it(handed_on: int) -> None:
    """The piece has 12 codes and up to 12 of look-ahead. Under load codes are handed on in any numbers."""
    assert handed_on + stream_interval(12).after(handed_on) <= 24


async def test_rows_keep_the_thinkers_dtype() -> None:
    half = rows_of(0, torch.zeros(5, WIDTH, dtype=torch.bfloat16), POSITIONS)
    made = await prompt_of(session(StageChunk(rows=half)))
    assert made.rows[0].dtype == "bfloat16"


def test_talker_goes_on_after_the_last_position_though_frames_were_at_later_ones() -> None:
    positions = np.array([[0, 1, 9, 1], [0, 1, 2, 3], [0, 4, 1, 2]])
    made = talker_positions(positions)
    assert np.array_equal(made[:, :4], positions)
    assert made[:, 4:].tolist() == [[4, 5]] * 3


@pytest.mark.parametrize("kind", ["text", "audio", "image", "audio+image"])
def test_positions_are_the_references(reference: Reference, speak: Speak, kind: str) -> None:
    thinker = reference.thinker(prompt_text(kind), *media(kind), max_new_tokens=1)
    assert np.array_equal(talker_positions(thinker.positions.numpy()), speak(kind).talker_positions.numpy())


def test_embeddings_are_rows_of_the_thinkers_token_table(tiny: Path, reference: Reference) -> None:
    ids, voices = SpecialIds.from_config(read_config(tiny)), load_voices(tiny)
    loaded = TextEmbeddings.load(tiny, ids, voices)
    table = reference.model.thinker.get_input_embeddings().weight
    assert torch.equal(loaded.eos, table[ids.text_eos]) and torch.equal(loaded.pad, table[ids.text_pad])
    assert loaded.voices.keys() == voices.keys()
    for name, voice in voices.items():
        assert torch.equal(loaded.voices[name], table[voice.bos_token])
