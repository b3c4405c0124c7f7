"""Exact streaming, against one decode by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES, PASS_ROWS, Reach
from omni_cluster.models.qwen3_omni.vocoder import Vocoder, load_vocoder
from omni_cluster.models.qwen3_omni.vocoder_pass import LENGTHS, PassTensors, StreamState, passes
from omni_cluster.types.errors import PayloadError

CODEBOOKS, CODES, WINDOW = 4, 256, 8
CPU = torch.device("cpu")
EXACT = 1e-7
"""In float64 differences are 0, or some 1e-16; transformers' norms round to float32 even there, which one may tip."""


@pytest.fixture(scope="module")
def vocoder(qwen3_folder: Path) -> Vocoder:
    return load_vocoder(qwen3_folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def exact(qwen3_folder: Path) -> Vocoder:
    return load_vocoder(qwen3_folder, CPU, torch.float64)


def codes_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, CODES, (count, CODEBOOKS)).astype(np.int16)


def cut(codes: np.ndarray, *sizes: int) -> list[np.ndarray]:
    return np.split(codes, np.cumsum(sizes))


def sized(count: int, most: int, seed: int = 0) -> list[int]:
    """Sizes of pieces, zero among them, that make up `count`."""
    sizes, random = [0], np.random.RandomState(seed)
    while sum(sizes) < count:
        sizes.append(min(random.randint(0, most + 1), count - sum(sizes)))
    return sizes


def streamed(vocoder: Vocoder, parts: Sequence[np.ndarray]) -> torch.Tensor:
    stream = vocoder.stream()
    return torch.cat([wave for part in parts for wave in vocoder.take([stream], [part])])


def decoded(vocoder: Vocoder, codes: np.ndarray) -> torch.Tensor:
    """At once where a pass may have so many."""
    return streamed(vocoder, cut(codes, *[PASS_CODES] * (len(codes) // PASS_CODES)))


def transformers_wave(model: Any, codes: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(codes.astype(np.int64)).T[None])[0, 0]


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


@pytest.mark.parametrize("count", [1, 2, WINDOW, 40, 330])
def test_one_decode_is_transformers(vocoder: Vocoder, qwen3_reference: Any, count: int) -> None:
    wave = decoded(vocoder, codes_of(count))
    assert len(wave) == 1920 * count - 555
    assert largest(wave - transformers_wave(qwen3_reference.code2wav, codes_of(count))) < 1e-5


@pytest.mark.parametrize("most", [1, 5, 50])
def test_the_joined_stream_is_one_decode(vocoder: Vocoder, exact: Vocoder, most: int) -> None:
    codes = codes_of(50, seed=most)
    parts = cut(codes, *sized(50, most, seed=most))
    assert largest(streamed(vocoder, parts) - decoded(vocoder, codes)) < 1e-5
    assert largest(streamed(exact, parts) - decoded(exact, codes)) < EXACT


def test_a_stream_of_more_than_300_codes_is_one_decode_by_transformers(exact: Vocoder, qwen3_reference: Any) -> None:
    """Past the seam that `chunked_decode` makes there, in more passes than one."""
    codes = codes_of(330)
    parts = cut(codes, 1, 2, 4, 8, *[PASS_CODES] * 4)
    wanted = transformers_wave(qwen3_reference.code2wav, codes)
    assert largest(streamed(exact, parts) - wanted) < 1e-5


def test_each_piece_has_all_the_samples_that_the_codes_so_far_allow(vocoder: Vocoder) -> None:
    """So nothing is left for the end."""
    stream, lengths = vocoder.stream(), []
    for part in cut(codes_of(20), 0, 1, 1, 3, 0, 12):
        lengths.append(len(vocoder.take([stream], [part])[0]))
    assert np.cumsum(lengths).tolist() == [0, 1365, 3285, 9045, 9045, 32085, 37845]


def test_the_last_codes_change_no_sample_that_was_given(exact: Vocoder) -> None:
    codes, others = codes_of(30), codes_of(30)
    others[20:] = codes_of(10, seed=1)
    same = exact.reach.samples(20)
    first, second = decoded(exact, codes), decoded(exact, others)
    assert torch.equal(first[:same], second[:same])
    assert not torch.equal(first[same : same + 555], second[same : same + 555])


def test_streams_of_different_ages_share_passes_and_sound_as_each_does_alone(exact: Vocoder) -> None:
    """Young ones, one past window and context, one that has nothing new, one that begins later."""
    parts = [cut(codes_of(36, seed), *sizes) for seed, sizes in enumerate([(1, 2, 20), (13, 13, 5), (0, 30, 0), (4,)])]
    parts[3] = [parts[3][0][:0], *parts[3]]
    streams = [exact.stream() for _ in parts]
    waves: list[list[torch.Tensor]] = [[] for _ in parts]
    for turn in range(max(map(len, parts))):
        taking = [place for place in range(len(parts)) if turn < len(parts[place])]
        made = exact.take([streams[place] for place in taking], [parts[place][turn] for place in taking])
        for place, wave in zip(taking, made, strict=True):
            waves[place].append(wave)
    for place in range(len(parts)):
        assert largest(torch.cat(waves[place]) - decoded(exact, codes_of(36, place))) < EXACT


def test_pieces_of_about_a_length_share_passes_of_bounded_size() -> None:
    lengths = [1, 64, 11, 9, 16, 0, 2, 17, 64, 33, 63, *[4] * 50]
    groups = passes(lengths, context=10)
    assert sorted(place for group in groups for place in group) == [i for i, length in enumerate(lengths) if length]
    for group in groups:
        least, most = min(lengths[place] for place in group), max(lengths[place] for place in group)
        assert most < 2 * least or most <= LENGTHS[0]
        assert len(group) * (10 + most) <= PASS_ROWS
    assert [len(group) for group in passes([5, 8, 6], 10)] == [3]
    assert [len(group) for group in passes([4] * 50, 10)] == [32, 18]


def test_what_a_stream_keeps_is_bounded(vocoder: Vocoder) -> None:
    stream, kept = vocoder.stream(), []
    for part in cut(codes_of(90), 7, 3, 60):
        vocoder.take([stream], [part])
        state = stream.state
        kept.append([tensor.untyped_storage().nbytes() // 4 for tensor in (state.kept, state.rows)])
    assert kept == [[2 * 2 * 32 * (WINDOW - 1), 32 * 10]] * 4


def test_no_less_context_would_do(exact: Vocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nine rows the sound differs."""
    codes = codes_of(40)
    wanted, parts = decoded(exact, codes), cut(codes, 20)
    work, reach = exact._work, exact.reach
    monkeypatch.setattr(work, "reach", Reach(reach.samples_per_code, reach.missing_samples, reach.context - 1))
    monkeypatch.setattr(work, "rows_shape", (reach.context - 1, work.rows_shape[1]))
    assert largest(streamed(exact, parts) - wanted) > 1e-6


@pytest.mark.parametrize(
    ("ratios", "rates", "reach"),
    [((2, 2), (8, 5, 4, 3), Reach(1920, 555, 10)), ((), (2,), Reach(2, 2, 49)), ((2,), (4, 4), Reach(32, 20, 19))],
)
def test_the_reach_follows_from_the_rates(ratios: Sequence[int], rates: Sequence[int], reach: Reach) -> None:
    assert Reach.of(ratios, rates) == reach


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        (np.array([[0, 1, 256, 3]]), "Codes have 256 among them; they are from 0 to 255."),
        (np.array([[0, -1, 2, 3]]), "Codes have -1 among them; they are from 0 to 255."),
        (np.zeros((2, 16), np.int16), "Codes have the shape [2, 16]; they are [n, 4]."),
        (np.zeros(4, np.int16), "Codes have the shape [4]; they are [n, 4]."),
        (np.zeros((2, 4), np.float32), "Codes are float32; they are integers."),
    ],
)
def test_bad_codes_are_refused_and_no_stream_of_the_pass_moves(vocoder: Vocoder, codes: np.ndarray, told: str) -> None:
    streams = [vocoder.stream(), vocoder.stream()]
    before = [stream.state for stream in streams]
    with pytest.raises(PayloadError) as error:
        vocoder.take(streams, [codes_of(3), codes])
    assert str(error.value) == told
    assert [stream.state for stream in streams] == before


def test_a_pass_that_fails_leaves_all_streams_as_they_were(vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a pass before it that was made."""
    streams, parts = [vocoder.stream(), vocoder.stream()], [codes_of(3), codes_of(60)]
    before, run = [stream.state for stream in streams], vocoder._passes._run

    def failing(states: Sequence[StreamState], codes: Sequence[np.ndarray]) -> PassTensors:
        made = run(states, codes)
        if len(codes[0]) == 60:
            raise RuntimeError("out of memory")
        return made

    monkeypatch.setattr(vocoder._passes, "_run", failing)
    with pytest.raises(RuntimeError):
        vocoder.take(streams, parts)
    assert all(stream.state is state for stream, state in zip(streams, before, strict=True))
    monkeypatch.undo()
    made = vocoder.take(streams, parts)
    assert [len(wave) for wave in made] == [vocoder.reach.samples(len(part)) for part in parts]
