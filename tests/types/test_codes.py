from __future__ import annotations

import numpy as np
import pytest

from omni_cluster.types.codes import Codes
from omni_cluster.types.errors import PayloadError

VALUES = np.arange(-6, 6, dtype=np.int16).reshape(6, 2)
CODES = Codes.of(10, VALUES)


def test_codes_are_what_they_were_made_of() -> None:
    assert np.array_equal(CODES.values, VALUES) and CODES.values.dtype == np.int16
    assert (len(CODES), CODES.end, CODES.first_values) == (6, 16, (-6, -4, -2, 0, 2, 4))


@pytest.mark.parametrize("start", range(8, 19))
def test_they_are_cut_by_position(start: int) -> None:
    for end in range(start, 19):
        part, wanted = CODES.between(start, end), VALUES[max(start - 10, 0) : max(end - 10, 0)]
        assert (part is None) == (not len(wanted))
        if part is not None:
            assert part.start == max(start, 10) and np.array_equal(part.values, wanted)
    assert CODES.after(start) == CODES.between(start, 99)


def test_parts_that_follow_each_other_are_joined() -> None:
    parts = [part for i in range(10, 16, 2) if (part := CODES.between(i, i + 2)) is not None]
    assert Codes.joined(parts) == CODES and Codes.joined([]) is None


@pytest.mark.parametrize(("start", "codebooks", "raw"), [(-1, 1, b""), (0, 0, b""), (0, 2, b"abcdef"), (0, -1, b"ab")])
def test_what_is_none_is_refused(start: int, codebooks: int, raw: bytes) -> None:
    with pytest.raises(PayloadError, match=r"which are none\.$"):
        Codes(start, codebooks, raw)


def test_values_beyond_int16_are_refused() -> None:
    with pytest.raises(OverflowError):
        Codes.of(0, [[1 << 15]])


def test_codes_of_a_prompt_are_at_its_tokens() -> None:
    prompt = [7] * 10 + list(CODES.first_values)
    CODES.check_among([*prompt, 7])
    for other in (prompt[:-1], [7, *prompt], []):
        with pytest.raises(
            PayloadError, match="Codes from 10 to 16 have first values that are not the prompt's tokens"
        ):
            CODES.check_among(other)
