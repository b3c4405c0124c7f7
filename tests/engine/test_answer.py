from __future__ import annotations

import tracemalloc

import numpy as np

from omni_cluster.engine.answer import AnswerBuilder, AnswerProgress
from omni_cluster.types.outputs import AudioChunk, Call, CallDelta, ImageChunk, StageChunk, TokenCounts
from tests.codes import coded, codes_chunk, codes_of

FINAL_TYPES = {"thinker": "text", "talker": None, "code2wav": "audio"}


def audio_chunk(start: int, *samples: float) -> AudioChunk:
    return AudioChunk(start, np.array(samples, np.float32), 24_000)


def test_answer_says_what_its_stages_said() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES)
    answer.add("thinker", StageChunk(0, (1,), "a", prompt_token_ids=(7, 8)))
    answer.add("talker", codes_chunk(0, (100, 101)))
    answer.add("thinker", StageChunk(1, (2, 3), "b", finish_reason="length"))
    answer.add("code2wav", StageChunk(audio=audio_chunk(0, 0.5, 0.25)))
    answer.add("talker", StageChunk(codes=coded((102,), 2), finish_reason="stop"))
    answer.add("code2wav", StageChunk(audio=audio_chunk(2, 0.125)))
    answer.add("code2wav", StageChunk(finish_reason="stop"))
    made = answer.finish()
    assert (made.request_id, made.text, made.token_ids) == ("r", "ab", (1, 2, 3))
    assert (made.prompt_token_ids, made.finish_reason) == ((7, 8), "length")
    assert codes_of(made) == [100, 101, 102]
    assert made.codec_tokens == 3
    assert made.audio is not None and made.audio.samples.tolist() == [0.5, 0.25, 0.125]
    assert (made.audio.start, made.audio.sample_rate_hz) == (0, 24_000)


def test_sound_that_reaches_its_limit_ends_the_answer_so_although_the_text_has_ended() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES)
    answer.add("thinker", StageChunk(0, (1,), "a", finish_reason="stop"))
    answer.add("talker", StageChunk(codes=coded((100,)), finish_reason="length"))
    answer.add("code2wav", StageChunk(finish_reason="stop"))
    made = answer.finish()
    assert made.finish_reason == "length"
    ends = {stage: times.finish_reason for stage, times in made.times.items()}
    assert ends == {"thinker": "stop", "talker": "length", "code2wav": "stop"}


def test_calls_are_put_together_of_their_pieces() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES)
    answer.add("thinker", StageChunk(0, (1,), "So. ", calls=(CallDelta(0, "a", "f"),)))
    answer.add("thinker", StageChunk(1, (2,), calls=(CallDelta(0, arguments="{}"), CallDelta(1, "b", "g"))))
    answer.add("thinker", StageChunk(2, (3,), calls=(CallDelta(1, arguments='{"a": 1}'),), finish_reason="stop"))
    made = answer.finish()
    assert (made.text, made.calls) == ("So. ", (Call("a", "f", "{}"), Call("b", "g", '{"a": 1}')))


def test_pictures_are_kept_in_a_whole_answer_and_not_in_a_streamed_one() -> None:
    types = {"thinker": "text", "painter": "image"}
    answer, streamed = AnswerBuilder("r", types), AnswerProgress(types)
    png = bytes(1 << 20)
    tracemalloc.start()
    for number in range(2):
        streamed.add("painter", StageChunk(images=(ImageChunk(number, bytes(png)),)))
        answer.add("painter", StageChunk(images=(ImageChunk(number, png),)))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.finish().images == (png, png) and held_bytes < len(png)


def test_times_are_those_of_the_first_and_last_chunk() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES)
    answer.add("thinker", StageChunk(0, (1,)))
    answer.add("talker", codes_chunk(0, (100,)))
    answer.add("thinker", StageChunk(1, (2,)))
    times = answer.finish().times
    assert times.keys() == {"thinker", "talker"}
    assert 0 <= times["thinker"].first_s <= times["talker"].first_s <= times["thinker"].last_s
    assert times["talker"].first_s == times["talker"].last_s
    assert times["thinker"].tokens == 2


def test_answer_without_sound_has_none() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES)
    answer.add("thinker", StageChunk(0, (1,), "a", finish_reason="stop"))
    answer.add("code2wav", StageChunk(finish_reason="stop"))
    assert answer.finish().audio is None


def test_answer_of_stages_that_said_nothing_is_empty() -> None:
    made = AnswerBuilder("r", FINAL_TYPES).finish()
    assert (made.text, made.token_ids, made.finish_reason, made.times) == ("", (), None, {})


def test_tokens_are_counted_as_they_come_and_of_the_whole() -> None:
    answer = AnswerBuilder("r", FINAL_TYPES, audio_tokens=lambda ids: ids.count(8))
    assert answer.counts == TokenCounts(0, 0, 0)
    answer.add("thinker", StageChunk(0, (1,), prompt_token_ids=(7, 8, 8), cached_tokens=2))
    answer.add("talker", StageChunk(codes=coded((100, 101)), prompt_token_ids=(8, 8, 8, 8), cached_tokens=3))
    answer.add("thinker", StageChunk(1, (2,)))
    assert answer.counts == answer.finish().counts == TokenCounts(prompt=3, text=2, codec=2, cached=2, prompt_audio=2)


def test_a_streamed_answer_keeps_none_of_its_sound_and_says_at_its_end_what_a_whole_one_does() -> None:
    """Ten seconds of sound are a megabyte."""
    streamed, whole = AnswerProgress(FINAL_TYPES), AnswerBuilder("r", FINAL_TYPES)
    tracemalloc.start()
    try:
        for number in range(500):
            text = StageChunk(number, (number,), "a" * 100, prompt_token_ids=(7, 8) if number == 0 else None)
            streamed.add("thinker", text)
            streamed.add("talker", codes_chunk(number, (100,)))
            streamed.add("code2wav", StageChunk(audio=AudioChunk(480 * number, np.zeros(480, np.float32), 24_000)))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 100_000
    for number in range(500):
        whole.add("thinker", StageChunk(number, (number,), prompt_token_ids=(7, 8) if number == 0 else None))
        whole.add("talker", codes_chunk(number, (100,)))
    for answer in (streamed, whole):
        answer.add("thinker", StageChunk(500, calls=(CallDelta(0, "a", "f"),), finish_reason="stop"))
    made = whole.finish()
    assert (streamed.counts, streamed.finish_reason) == (made.counts, made.finish_reason)
    assert streamed.makes_calls == made.makes_calls is True
    assert streamed.times.keys() == {"code2wav", *made.times}
