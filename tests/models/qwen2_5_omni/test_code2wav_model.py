"""Code2wav against transformers' token2wav, one request at a time and many at once."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_cluster.config.precision import LayerPrecision, Precision
from omni_cluster.models.qwen2_5_omni.code2wav import REPLAYED_BLOCKS
from omni_cluster.models.qwen2_5_omni.code2wav_model import Code2WavModel, VocoderPass
from omni_cluster.models.qwen2_5_omni.options import Code2WavOptions
from omni_cluster.models.qwen2_5_omni.voices import load_voices
from omni_cluster.models.sound import SoundJob
from omni_cluster.types.errors import NotFinite, PayloadError
from tests.models.qwen2_5_omni.likeness import STREAMING_SNR_DB, snr_db
from tests.reference import Reference

SAMPLES_PER_CODE = 480


@pytest.fixture(scope="module")
def model(tiny: Path) -> Code2WavModel:
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"))


def job(count: int, voice: str = "Chelsie", seed: int = 0) -> SoundJob:
    return job_of(np.random.RandomState(count).randint(0, 8192, count).tolist(), voice, seed)


def job_of(codes: Sequence[int], voice: str = "Chelsie", seed: int = 0, first: int = 0, **fields: Any) -> SoundJob:
    """Of codes from the request's code `first` on."""
    heard = len(codes) - fields.get("look_ahead", 0)
    samples = range(first * SAMPLES_PER_CODE, (first + heard) * SAMPLES_PER_CODE)
    return SoundJob(np.array(codes)[:, None], samples, 2 * len(codes), voice, seed, **fields)


def codes_of(job: SoundJob) -> list[int]:
    return [int(code) for code in job.codes[:, 0]]


def made_by(model: Code2WavModel, jobs: Sequence[SoundJob]) -> list[np.ndarray]:
    """The jobs' waveforms, all of them in the same steps."""
    numbers = range(len(jobs))
    for number, one in enumerate(jobs):
        model.begin(number, one)
    for _ in range(model.steps):
        model.step(numbers)
    return model.finish(numbers)


def wanted(reference: Reference, asked: SoundJob) -> np.ndarray:
    assert asked.voice is not None and asked.seed is not None
    return _waveform(reference, tuple(codes_of(asked)), asked.voice, asked.seed)


@functools.cache
def _waveform(reference: Reference, codes: tuple[int, ...], voice: str, seed: int) -> np.ndarray:
    """Several tests compare with the same one."""
    return reference.waveform(codes, voice, seed)


def assert_close(made: np.ndarray, expected: np.ndarray) -> None:
    assert made.dtype == np.float32 and made.shape == expected.shape
    np.testing.assert_allclose(made, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 11, 12, 13, 60])
def test_alone_is_the_reference_around_the_dits_block_size(
    model: Code2WavModel, reference: Reference, count: int
) -> None:
    (made,) = made_by(model, [job(count)])
    assert made.shape == (count * SAMPLES_PER_CODE,) and np.abs(made).max() > 0.01
    assert_close(made, wanted(reference, job(count)))


def test_batch_of_different_lengths_voices_and_seeds_is_the_reference(
    model: Code2WavModel, reference: Reference
) -> None:
    asked = [job(60, "Ethan", 1), job(50, "Chelsie", 2), job(60, "Chelsie", 3), job(49, "Ethan", 4), job(12)]
    for made, one in zip(made_by(model, asked), asked, strict=True):
        assert_close(made, wanted(reference, one))


@pytest.mark.parametrize("num_steps", [2, 5])
def test_another_number_of_steps_is_the_references(tiny: Path, reference: Reference, num_steps: int) -> None:
    options = Code2WavOptions(num_steps=num_steps)
    model = Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), options)
    jobs = [job(60), job(37, "Ethan", seed=1)]
    for one, wave in zip(jobs, made_by(model, jobs), strict=True):
        assert one.voice is not None and one.seed is not None
        assert_close(wave, reference.waveform(codes_of(one), one.voice, one.seed, num_steps))
    whole = job(60)
    joined = streamed(model, whole, [1, 1])
    assert snr_db(joined, reference.waveform(codes_of(whole), num_steps=num_steps)) > STREAMING_SNR_DB


def test_equal_jobs_of_a_batch_are_equal(model: Code2WavModel) -> None:
    first, _, last = made_by(model, [job(20), job(24), job(20)])
    np.testing.assert_array_equal(first, last)


def test_seed_voice_and_codes_each_change_the_waveform(model: Code2WavModel) -> None:
    plain = job(20)
    (made,) = made_by(model, [plain])
    others = [
        replace(plain, seed=1),
        replace(plain, voice="Ethan"),
        replace(plain, codes=plain.codes[::-1]),
    ]
    for other in made_by(model, others):
        assert np.abs(other - made).max() > 1e-3


def test_last_code_of_the_embedding_can_be_spoken(model: Code2WavModel, reference: Reference) -> None:
    asked = job_of((8193, 0, 8192))
    (made,) = made_by(model, [asked])
    assert_close(made, wanted(reference, asked))


def test_sound_stays_within_bounds(model: Code2WavModel) -> None:
    (made,) = made_by(model, [job(60)])
    assert np.abs(made).max() <= 1


BLOCK = 12
"""Codes of one block of the DiT."""


def pieces(full: SoundJob, plan: list[int], name: str, look_ahead: int = BLOCK) -> list[SoundJob]:
    """The job cut into pieces of so many blocks each, and a last one of what is left."""
    made, start, codes = [], 0, codes_of(full)
    of = functools.partial(job_of, voice=full.voice, seed=full.seed, stream=name)
    for blocks in plan:
        end = start + blocks * BLOCK
        made.append(of(codes[start : end + look_ahead], first=start, look_ahead=look_ahead))
        start = end
    return [*made, of(codes[start:], first=start)]


def streamed(
    model: Code2WavModel, full: SoundJob, plan: list[int], name: str = "s", look_ahead: int = BLOCK
) -> np.ndarray:
    made = [made_by(model, [piece])[0] for piece in pieces(full, plan, name, look_ahead)]
    model.forget([name])
    return np.concatenate(made)


@pytest.mark.parametrize(
    ("count", "plan"),
    [
        pytest.param(200, [1, 1, 2, 4], marks=pytest.mark.full),
        pytest.param(200, [1] * 14, marks=pytest.mark.full),
        (100, [1, 1, 2, 2]),
        (49, [1, 1]),
        (40, [1]),
        (24, [1]),
    ],
)
def test_pieces_join_to_almost_the_whole_waveform(
    model: Code2WavModel, reference: Reference, count: int, plan: list[int]
) -> None:
    """They differ as the look-ahead, one block, is less than all that the whole computation sees."""
    full = job(count, "Ethan", 5)
    made, whole = streamed(model, full, plan), wanted(reference, full)
    assert made.shape == whole.shape
    assert snr_db(made, whole) >= STREAMING_SNR_DB


@pytest.mark.parametrize("look_ahead", [6, 1])
def test_pieces_that_see_less_ahead_differ_at_their_ends_alone(
    model: Code2WavModel, reference: Reference, look_ahead: int
) -> None:
    """What the piece's last block lacks is not kept: the middle of the next piece is the whole computation's."""
    full, plan = job(76, "Ethan", 5), [3]
    made, whole = streamed(model, full, plan, look_ahead=look_ahead), wanted(reference, full)
    border, block = 3 * BLOCK * SAMPLES_PER_CODE, BLOCK * SAMPLES_PER_CODE
    assert made.shape == whole.shape
    at_border = slice(border - block, border)
    assert snr_db(made[at_border], whole[at_border]) < STREAMING_SNR_DB
    assert snr_db(made[: border - 2 * block], whole[: border - 2 * block]) > STREAMING_SNR_DB
    assert snr_db(made[border + 2 * block :], whole[border + 2 * block :]) > STREAMING_SNR_DB


def test_last_frames_that_nothing_follows_are_the_wholes(model: Code2WavModel, reference: Reference) -> None:
    """One piece with all codes is the whole computation, in a stream too."""
    full = job(30)
    assert_close(streamed(model, full, []), wanted(reference, full))


def test_streams_of_one_batch_are_what_they_are_alone(model: Code2WavModel) -> None:
    full = [job(60, "Ethan", 1), job(100, "Chelsie", 2), job(49, "Chelsie", 3)]
    plan = [1, 1]
    alone = [streamed(model, one, plan) for one in full]
    rounds = zip(*(pieces(one, plan, f"s{i}") for i, one in enumerate(full)), strict=True)
    together = [made_by(model, [*batch, job(20)])[:3] for batch in rounds]
    model.forget(["s0", "s1", "s2"])
    for made, wanted_alone in zip(zip(*together, strict=True), alone, strict=True):
        np.testing.assert_allclose(np.concatenate(made), wanted_alone, atol=1e-5, rtol=0)


def test_pieces_that_others_join_at_any_step_are_what_they_are_alone(model: Code2WavModel) -> None:
    """Guests come after each step, every second one pauses at every second step, and one leaves before its end."""
    stream = pieces(job(40, "Ethan", 1), [1, 1], "joined")[:2]
    alone = [made_by(model, [one])[0] for one in stream]
    model.forget(["joined"])
    guest = job(2, "Chelsie", 2)
    (guest_alone,) = made_by(model, [guest])
    for one, wanted_alone in zip(stream, alone, strict=True):
        model.begin(0, one)
        left = {0: model.steps}
        for step in itertools.count():
            if step < model.steps:
                model.begin(1 + step, guest)
                left[1 + step] = model.steps
            if step == 5:
                model.drop([5])
                left.pop(5)
            going = [number for number in left if left[number] and (number == 0 or (number + step) % 2)]
            model.step(going)
            left |= {number: left[number] - 1 for number in going}
            if not any(left.values()):
                break
        made, *guests = model.finish(list(left))
        np.testing.assert_allclose(made, wanted_alone, atol=1e-5, rtol=0)
        for one_guest in guests:
            np.testing.assert_allclose(one_guest, guest_alone, atol=1e-5, rtol=0)
    model.forget(["joined"])


def test_a_piece_may_follow_the_one_before_it_by_a_step(model: Code2WavModel) -> None:
    first, second, last = pieces(job(40, "Ethan", 1), [1, 1], "follows")
    alone = [made_by(model, [one])[0] for one in (first, second, last)]
    model.forget(["follows"])
    model.begin(0, first)
    model.step([0])
    model.begin(1, second)
    for _ in range(model.steps - 1):
        model.step([0, 1])
    made = model.finish([0])
    model.begin(2, last)
    model.step([1])
    made += model.finish([1])
    for _ in range(model.steps):
        model.step([2])
    made += model.finish([2])
    model.forget(["follows"])
    for one, wanted_alone in zip(made, alone, strict=True):
        np.testing.assert_allclose(one, wanted_alone, atol=1e-5, rtol=0)


def test_pieces_that_nobody_hears_leave_the_next_ones_what_they_need(
    model: Code2WavModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = job(100, "Ethan", 1)
    vocoded, vocode = [], model._vocode

    def watched(pieces: Any, windows: Any) -> Any:
        vocoded.extend(piece.job.samples for piece in pieces)
        return vocode(pieces, windows)

    monkeypatch.setattr(model, "_vocode", watched)
    cut = pieces(full, [2, 1, 1], "unheard")
    expected = [made_by(model, [one])[0] for one in cut]
    model.forget(["unheard"])
    del vocoded[:]
    silent = [replace(one, is_heard=False) for one in cut[:2]]
    made = [made_by(model, [one])[0] for one in [*silent, *cut[2:]]]
    model.forget(["unheard"])
    assert vocoded == [one.samples for one in cut[2:]]
    assert [len(one) for one in made] == [len(one) for one in expected]
    for one, wanted_one in zip(made[2:], expected[2:], strict=True):
        np.testing.assert_array_equal(one, wanted_one)


def test_a_stream_that_begins_in_the_midst_of_its_request_soon_sounds_as_one_from_the_beginning(
    model: Code2WavModel,
) -> None:
    """Of what a block leaves in those behind it, each block more leaves less."""
    cut = pieces(job(16 * BLOCK, "Ethan", 1), [2] * 7, "replayed")
    expected = [made_by(model, [one])[0] for one in cut]
    model.forget(["replayed"])
    near_db = []
    for replayed_blocks in (0, 2, REPLAYED_BLOCKS):
        first = len(cut) - 1 - replayed_blocks // 2
        made = [made_by(model, [replace(one, is_heard=False)])[0] for one in cut[first:-1]]
        made += made_by(model, cut[-1:])
        model.forget(["replayed"])
        assert made[-1].shape == expected[-1].shape
        near_db.append(snr_db(made[-1], expected[-1]))
    assert near_db[0] < STREAMING_SNR_DB < 80 < near_db[1] <= near_db[2] + 3 and near_db[2] > REPLAYED_SNR_DB


REPLAYED_SNR_DB = 105.0


def test_a_forgotten_stream_leaves_nothing_to_the_next(model: Code2WavModel) -> None:
    full = job(60, "Ethan", 1)
    first = streamed(model, full, [1, 1])
    abandoned = pieces(job(100, "Chelsie", 9), [1, 2], "abandoned")
    made_by(model, abandoned[:1])
    model.forget(["abandoned", "abandoned", "never begun"])
    np.testing.assert_array_equal(streamed(model, full, [1, 1]), first)


def test_as_many_streams_as_there_is_room_for(tiny: Path) -> None:
    small = Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), Code2WavOptions(max_streams=2))
    begun = [pieces(job(40), [1], name)[0] for name in ("a", "b", "c")]
    made_by(small, begun[:2])
    with pytest.raises(RuntimeError, match="2 streams are open"):
        made_by(small, begun[2:])
    small.forget(["a"])
    assert len(made_by(small, begun[2:])) == 1


def test_sound_that_is_made_beside_a_step_is_what_it_is_alone(model: Code2WavModel) -> None:
    check_sound_beside_steps(model)


def check_sound_beside_steps(model: Code2WavModel) -> None:
    """Two streams' pieces are finished beside a neighbour's steps: those that the step was told, or others of them."""
    full, neighbour = [job(100, "Ethan", 1), job(100, "Chelsie", 2)], job(200, "Ethan", 7)
    alone = [streamed(model, one, [1, 1, 2]) for one in full]
    (neighbour_alone,) = made_by(model, [neighbour])
    model.begin(9, neighbour)
    made: list[list[np.ndarray]] = []
    told: list[list[int]] = [[0, 1], [0], [1], []]
    batches = list(zip(*(pieces(one, [1, 1, 2], f"s{i}") for i, one in enumerate(full)), strict=True))
    for batch, ending in zip(batches, told, strict=True):
        for number, piece in enumerate(batch):
            model.begin(number, piece)
        for _ in range(model.steps):
            model.step([0, 1])
        model.step([9], ending)
        made.append(model.finish([0, 1]))
    for _ in range(model.steps - len(batches)):
        model.step([9])
    np.testing.assert_allclose(model.finish([9])[0], neighbour_alone, atol=1e-4, rtol=0)
    model.forget(["s0", "s1"])
    for joined, wanted_alone in zip(zip(*made, strict=True), alone, strict=True):
        np.testing.assert_allclose(np.concatenate(joined), wanted_alone, atol=1e-4, rtol=0)


def test_a_job_that_is_dropped_while_its_sound_is_made_leaves_its_neighbour(model: Code2WavModel) -> None:
    asked = [job(30, "Ethan", 1), job(30, "Chelsie", 2), job(13)]
    expected = [made_by(model, [one])[0] for one in asked]
    for number, one in enumerate(asked):
        model.begin(number, one)
    for _ in range(model.steps - 1):
        model.step([0, 1, 2])
    model.step([0, 1])
    model.step([2], ending=[0, 1])
    model.drop([0])
    for number in (1, 2):
        np.testing.assert_allclose(model.finish([number])[0], expected[number], atol=1e-5, rtol=0)


def test_what_a_stream_keeps_is_its_own_once_there_is_sound(
    model: Code2WavModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card the memory of a piece that is gone may be a step's before the vocoder's stream does more."""
    full, waves = job(60, "Ethan", 1), model._waves
    alone = streamed(model, full, [1, 1, 2])

    def written_over(begun: VocoderPass) -> list[np.ndarray]:
        made = waves(begun)
        for piece in begun.pieces:
            piece.flow.state.fill_(torch.nan)
        return made

    monkeypatch.setattr(model, "_waves", written_over)
    np.testing.assert_array_equal(streamed(model, full, [1, 1, 2]), alone)


def breaks(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("it broke")


def test_a_step_or_a_finish_that_fails_leaves_its_streams_as_they_were(
    model: Code2WavModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last layer of a step all keys and values are written; after the vocoder all sound is made."""
    full = [job(60, "Ethan", 1), job(100, "Chelsie", 2)]
    alone = [streamed(model, one, [1, 1]) for one in full]
    made, project, numbers = [], model._dit.proj_out, range(len(full))
    for batch in zip(*(pieces(one, [1, 1], f"s{i}") for i, one in enumerate(full)), strict=True):
        for number, piece in enumerate(batch):
            model.begin(number, piece)
        for _ in range(model.steps):
            model._dit.proj_out = None  # type: ignore[assignment]
            with pytest.raises(TypeError):
                model.step(numbers)
            model._dit.proj_out = project
            for number in numbers:
                model.step([number])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", breaks)
            with pytest.raises(RuntimeError, match="it broke"):
                model.finish(numbers)
        made.append([model.finish([number])[0] for number in numbers])
    model.forget(["s0", "s1"])
    for pieces_made, wanted_alone in zip(zip(*made, strict=True), alone, strict=True):
        np.testing.assert_allclose(np.concatenate(pieces_made), wanted_alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("code", [-1, 8194, 8293, 1 << 40])
def test_what_is_no_code_is_refused_before_anything_is_computed(
    model: Code2WavModel, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(model, "_flow", None)
    with pytest.raises(PayloadError, match=f"the code {code}; codes are from 0 to 8193"):
        model.begin(0, job_of((1, code), stream="none"))
    assert not model._pieces and not model._streams


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"codes": np.zeros((2, 2), np.int16)}, r"codes of the shape \(2, 2\); they are \[n, 1\]"),
        ({"voice": None}, "the voice None; voices are Chelsie, Ethan"),
        ({"seed": None}, "no seed"),
    ],
)
def test_a_job_of_another_models_kind_is_refused(model: Code2WavModel, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PayloadError, match=told):
        model.begin(0, replace(job(2), stream="none", **fields))
    assert not model._pieces and not model._streams


def test_bfloat16_is_near_the_reference(tiny: Path, reference: Reference) -> None:
    config = Code2WavOptions(dtype="bfloat16", vocoder_dtype="bfloat16")
    fast = Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), config)
    (made,) = made_by(fast, [job(60)])
    assert snr_db(made, wanted(reference, job(60))) >= BFLOAT16_SNR_DB


BFLOAT16_SNR_DB = 25.0


@pytest.mark.parametrize(
    ("dtype", "shares_card", "blocks"), [("bfloat16", True, 8), ("bfloat16", False, 0), ("float32", True, 0)]
)
def test_layers_of_small_steps_are_one_kernel_beside_all_other_stages(
    tiny: Path, dtype: Precision, shares_card: bool, blocks: int
) -> None:
    config = Code2WavOptions(dtype=dtype)
    model = Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), config, shares_card)
    assert model._dit.resident_blocks == blocks


def with_vocoder_in(dtype: Precision, folder: Path) -> Code2WavModel:
    return Code2WavModel(folder, load_voices(folder), torch.device("cpu"), Code2WavOptions(vocoder_dtype=dtype))


def test_a_vocoder_in_float16_is_near_the_reference_whole_and_in_pieces(
    tiny: Path, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    model, full = with_vocoder_in("float16", tiny), job(100, "Ethan", 5)
    for made in (*made_by(model, [full]), streamed(model, full, [1, 1, 2])):
        assert STREAMING_SNR_DB <= snr_db(made, wanted(reference, full)) < FLOAT16_MORE_DB
    assert "range of float16" not in caplog.text


FLOAT16_MORE_DB = 65.0
"""So much is float32."""


@pytest.fixture(scope="module")
def loud(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose vocoder has activations of 100,000, where float16 ends at 65,504."""
    folder = tmp_path_factory.mktemp("loud") / "checkpoint"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    weights[FIRST_BIAS] = torch.full_like(weights[FIRST_BIAS], 1e5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


FIRST_BIAS = "token2wav.code2wav_bigvgan_model.conv_pre.bias"


def test_sound_past_the_range_of_float16_is_made_in_float32(loud: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = [job(30, "Ethan", 1), job(13)]
    full, narrow, wide = job(60), with_vocoder_in("float16", loud), with_vocoder_in("float32", loud)
    for made, expected in zip(made_by(narrow, asked), made_by(wide, asked), strict=True):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(streamed(narrow, full, [1, 2]), streamed(wide, full, [1, 2]))
    assert caplog.text.count("past the range of float16") == 1


@pytest.fixture(scope="module")
def in_float8(tiny: Path) -> Code2WavModel:
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cpu"), Code2WavOptions(dtype="float8"))


def test_float8_is_near_the_reference_whole_and_in_pieces(in_float8: Code2WavModel, reference: Reference) -> None:
    full = job(100, "Ethan", 5)
    (whole,) = made_by(in_float8, [full])
    in_pieces = streamed(in_float8, full, [1, 1, 2])
    for made in (whole, in_pieces):
        assert FLOAT8_SNR_DB <= snr_db(made, wanted(reference, full)) < BFLOAT16_MORE_DB
    assert snr_db(in_pieces, whole) >= STREAMING_SNR_DB


FLOAT8_SNR_DB = 40.0
"""On the tiny checkpoint, whose layers add little to what they are given."""
BFLOAT16_MORE_DB = 55.0
"""What bfloat16 has with the same vocoder: so much is not float8."""


def test_float8_is_the_same_beside_others(in_float8: Code2WavModel) -> None:
    asked = [job(60, "Ethan", 1), job(20), job(13)]
    for beside, one in zip(made_by(in_float8, asked), asked, strict=True):
        np.testing.assert_allclose(beside, made_by(in_float8, [one])[0], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------ CUDA


def on_cuda(tiny: Path, precision: LayerPrecision, vocoder: Precision) -> Code2WavModel:
    config = Code2WavOptions(dtype=precision, vocoder_dtype=vocoder, max_streams=4, max_batch_frames=480)
    return Code2WavModel(tiny, load_voices(tiny), torch.device("cuda"), config)


@pytest.mark.gpu
def test_float32_on_cuda_is_the_reference_alone_and_batched(tiny: Path, reference: Reference) -> None:
    model = on_cuda(tiny, "float32", "float32")
    asked = [job(60, "Ethan", 1), job(50, "Chelsie", 2), job(13), job(1)]
    for one in asked:
        assert_close(made_by(model, [one])[0], wanted(reference, one))
    for made, one in zip(made_by(model, asked), asked, strict=True):
        assert_close(made, wanted(reference, one))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "vocoder", "least_db"),
    [
        ("float32", "float32", 80.0),
        ("tfloat32", "tfloat32", 35.0),
        ("bfloat16", "tfloat32", 30.0),
        ("float16", "float16", 35.0),
        ("bfloat16", "bfloat16", 25.0),
        ("float8", "tfloat32", 30.0),
    ],
)
def test_each_precision_on_cuda_is_near_the_reference(
    tiny: Path, reference: Reference, precision: LayerPrecision, vocoder: Precision, least_db: float
) -> None:
    model, full = on_cuda(tiny, precision, vocoder), job(100, "Ethan", 5)
    (whole,) = made_by(model, [full])
    assert snr_db(whole, wanted(reference, full)) >= least_db
    assert snr_db(streamed(model, full, [1, 1, 2]), wanted(reference, full)) >= min(least_db, STREAMING_SNR_DB)


@pytest.mark.gpu
def test_sound_that_is_made_beside_a_step_is_what_it_is_alone_on_cuda(tiny: Path) -> None:
    for _ in range(5):
        check_sound_beside_steps(on_cuda(tiny, "float32", "float32"))


@pytest.mark.gpu
def test_what_a_stream_keeps_is_its_own_when_its_memory_is_the_steps_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocoder's stream of the device is far behind the steps', as on a busy card, once a piece is finished."""
    model, full, neighbour = on_cuda(tiny, "float32", "float32"), job(60, "Ethan", 1), job(24)
    alone, plan, waves = streamed(model, full, [1, 1, 1]), pieces(full, [1, 1, 1], "s"), model._waves

    def made_far_behind(begun: VocoderPass) -> list[np.ndarray]:
        made = waves(begun)
        torch.cuda._sleep(FAR_BEHIND_CYCLES)  # type: ignore[no-untyped-call]
        return made

    monkeypatch.setattr(model, "_waves", made_far_behind)
    joined = []
    for piece in plan:
        joined += made_by(model, [piece])
        made_by(model, [neighbour])  # of as many frames as a piece: it is given the memory that a piece had
    np.testing.assert_allclose(np.concatenate(joined), alone, atol=1e-4, rtol=0)


FAR_BEHIND_CYCLES = 200_000_000
"""Some 0.1 s."""


@pytest.mark.gpu
def test_sound_past_the_range_of_float16_is_made_again_on_cuda(loud: Path) -> None:
    narrow, wide = on_cuda(loud, "float32", "float16"), on_cuda(loud, "float32", "tfloat32")
    asked = [job(60, "Ethan", 1), job(13)]
    for made, expected in zip(made_by(narrow, asked), made_by(wide, asked), strict=True):
        assert np.isfinite(made).all() and snr_db(made, expected) >= 30.0


@pytest.fixture(scope="module")
def model_with_a_broken_voice(tiny: Path) -> Code2WavModel:
    """The voice `Broken` has no numbers to be spoken with."""
    voices = load_voices(tiny)
    nothing = torch.full_like(voices["Chelsie"].conditioning, torch.nan)
    broken = replace(voices["Chelsie"], name="Broken", conditioning=nothing)
    few_places = Code2WavOptions(max_streams=3)
    return Code2WavModel(tiny, {"Broken": broken, **voices}, torch.device("cpu"), few_places)


def test_sound_that_is_not_finite_fails_its_job_and_leaves_its_neighbours(
    model_with_a_broken_voice: Code2WavModel,
) -> None:
    model = model_with_a_broken_voice
    before = made_by(model, [job(13), job(30, "Ethan")])
    jobs = [job(13), job(20, "Broken"), job(30, "Ethan")]
    for number, one in enumerate(jobs):
        model.begin(number, one)
    for _ in range(model.steps):
        model.step(range(len(jobs)))
    with pytest.raises(NotFinite, match="infinite or no number"):
        model.finish(range(len(jobs)))
    with pytest.raises(NotFinite):
        model.finish([1])
    model.drop([1])
    for made, expected in zip(model.finish([0, 2]), before, strict=True):
        np.testing.assert_array_equal(made, expected)


def test_a_place_that_a_broken_stream_had_carries_nothing_to_the_next(
    model_with_a_broken_voice: Code2WavModel,
) -> None:
    model = model_with_a_broken_voice

    def first_piece(name: str, voice: str) -> SoundJob:
        return job_of(codes_of(job(36)), voice, stream=name, look_ahead=12)

    (before,) = made_by(model, [first_piece("before", "Chelsie")])
    model.forget(["before"])
    model.begin(1, first_piece("broken", "Broken"))
    model.begin(2, first_piece("beside", "Chelsie"))
    for _ in range(model.steps):
        model.step([1, 2])
    np.testing.assert_array_equal(model.finish([2])[0], before)
    model.drop([1])
    model.forget(["broken", "beside"])
    for i in range(2 * len(model._free_slots)):
        (after,) = made_by(model, [first_piece(f"after-{i}", "Chelsie")])
        np.testing.assert_array_equal(after, before)
        model.forget([f"after-{i}"])
