from __future__ import annotations

import math
import statistics

import pytest

from omni_cluster.bench.mix import MAX_SPOKEN_S, Mix
from tests.bench.records import CODES_PER_S

COUNT = 4000


def test_lengths_are_within_their_bounds_and_log_uniform() -> None:
    drawn = [Mix(codes_per_s=CODES_PER_S).lengths(0, place) for place in range(COUNT)]
    words = [lengths.prompt_tokens for lengths in drawn if not lengths.spoken_s]
    sound_s = [lengths.codec_tokens / 50 for lengths in drawn]
    for values, low, high in ((words, 20, 2000), (sound_s, 2.0, 20.0)):
        assert low <= min(values) < 1.1 * low and 0.9 * high < max(values) <= high
        assert statistics.median(values) == pytest.approx(math.sqrt(low * high), rel=0.1)
    assert all(lengths.text_tokens == round(lengths.codec_tokens / 8) for lengths in drawn)


def test_half_of_the_prompts_are_spoken_and_none_for_too_long() -> None:
    spoken = [lengths for place in range(COUNT) if (lengths := Mix(codes_per_s=CODES_PER_S).lengths(0, place)).spoken_s]
    assert len(spoken) / COUNT == pytest.approx(0.5, abs=0.05)
    assert all(lengths.spoken_s == lengths.prompt_tokens / 25 for lengths in spoken)
    assert min(each.spoken_s for each in spoken) >= 0.8 and max(each.spoken_s for each in spoken) <= MAX_SPOKEN_S


@pytest.mark.parametrize(("share", "spoken"), [(0.0, 0), (1.0, 100)])
def test_none_or_all_may_be_spoken(share: float, spoken: int) -> None:
    mix = Mix(spoken_share=share, codes_per_s=CODES_PER_S)
    assert sum(mix.lengths(0, place).spoken_s > 0 for place in range(100)) == spoken


def test_lengths_are_drawn_by_seed_and_place() -> None:
    drawn = [Mix(codes_per_s=CODES_PER_S).lengths(0, place) for place in range(50)]
    assert drawn == [Mix(codes_per_s=CODES_PER_S).lengths(0, place) for place in range(50)]
    assert len(set(drawn)) > 45
    assert drawn != [Mix(codes_per_s=CODES_PER_S).lengths(1, place) for place in range(50)]


def test_a_range_of_one_length_is_that_length_and_no_reply_is_too_short_to_speak() -> None:
    lengths = Mix(codes_per_s=CODES_PER_S, sound_s=(0.01, 0.01), prompt_tokens=(900, 900)).lengths(0, 0)
    assert (lengths.prompt_tokens, lengths.text_tokens, lengths.codec_tokens) == (900, 2, 1)
