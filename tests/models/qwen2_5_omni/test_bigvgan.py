"""The vocoder against transformers' BigVGAN, which computes one row at a time at the row's own length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from omni_cluster.models.qwen2_5_omni import bigvgan
from omni_cluster.models.qwen2_5_omni.bigvgan import Snake, Vocoder
from omni_cluster.models.qwen2_5_omni.token2wav import load_token2wav
from omni_cluster.types.errors import ConfigError

CPU = torch.device("cpu")
SAMPLES_PER_FRAME = 240
CONTEXT_FRAMES = 20
KERNEL_CASES = [(24, [1, 0, 1]), (24, [37, 1, 2, 36]), (96, [3, 64, 200]), (768, [77, 33])]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Qwen2_5OmniToken2WavBigVGANModel:
    """The tiny BigVGAN, louder, and with snakes that differ, of which a random checkpoint's are all the same."""
    model = load_token2wav(tiny, CPU).code2wav_bigvgan_model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".alpha", ".beta")):
                parameter.normal_(0, 0.3, generator=generator)
        model.conv_post.weight.mul_(5)
    return model


@pytest.fixture(scope="module")
def vocoder(model: Qwen2_5OmniToken2WavBigVGANModel) -> Vocoder:
    return Vocoder(model, CPU, torch.float32)


def mels_of(lengths: Sequence[int], beyond: float = 0.0) -> torch.Tensor:
    mels = torch.randn(len(lengths), max(lengths), 80, generator=torch.Generator().manual_seed(1)) * 2 - 4
    for mel, length in zip(mels, lengths, strict=True):
        mel[length:] = beyond
    return mels


def int32(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def reference(model: Qwen2_5OmniToken2WavBigVGANModel, mel: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(mel.T[None].to(model.dtype)).float()


def noise_over_signal(wanted: torch.Tensor, made: torch.Tensor) -> float:
    return float((made - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("lengths", [[1], [2], [3], [13], [24, 1, 2, 3, 7, 24], [5, 40]])
def test_each_row_is_what_the_reference_makes_of_it_alone(
    model: Qwen2_5OmniToken2WavBigVGANModel, vocoder: Vocoder, lengths: list[int]
) -> None:
    mels = mels_of(lengths)
    waves = vocoder(mels, int32(lengths))
    assert waves.dtype == torch.float32 and waves.shape == (len(lengths), max(lengths) * SAMPLES_PER_FRAME)
    for wave, mel, length in zip(waves, mels, lengths, strict=True):
        wanted = reference(model, mel[:length])
        assert wanted.abs().max() > 0.01
        torch.testing.assert_close(wave[: length * SAMPLES_PER_FRAME], wanted, atol=1e-5, rtol=0)


def test_what_a_mel_holds_beyond_its_length_is_never_heard(vocoder: Vocoder) -> None:
    lengths = int32([6, 20])
    silent, noisy = (vocoder(mels_of([6, 20], beyond), lengths) for beyond in (0.0, float("nan")))
    torch.testing.assert_close(noisy, silent, atol=0, rtol=0)


def test_a_row_of_no_frames_leaves_the_others_alone(vocoder: Vocoder) -> None:
    mels = mels_of([9, 9])
    alone = vocoder(mels[1:], int32([9]))
    torch.testing.assert_close(vocoder(mels, int32([0, 9]))[1:], alone, atol=1e-5, rtol=0)


def test_a_chunk_with_context_on_both_sides_is_a_part_of_the_whole(vocoder: Vocoder) -> None:
    mels, start, end = mels_of([100]), 40, 60
    whole = vocoder(mels, int32([100]))[0]
    chunk = mels[:, start - CONTEXT_FRAMES : end + CONTEXT_FRAMES]
    made = vocoder(chunk, int32([chunk.shape[1]]))[0, CONTEXT_FRAMES * SAMPLES_PER_FRAME :]
    wanted = whole[start * SAMPLES_PER_FRAME : end * SAMPLES_PER_FRAME]
    torch.testing.assert_close(made[: len(wanted)], wanted, atol=1e-5, rtol=0)


def test_waves_are_clipped_to_full_scale(model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
    loud = copy.deepcopy(model)
    with torch.no_grad():
        loud.conv_post.weight.mul_(100)
    wave = Vocoder(loud, CPU, torch.float32)(mels_of([5]), int32([5]))
    assert wave.max() == 1 and wave.min() == -1


def test_bfloat16_is_nearer_to_float32_than_the_references_bfloat16(
    model: Qwen2_5OmniToken2WavBigVGANModel,
) -> None:
    (mel,) = mels_of([30])
    wanted = reference(model, mel)
    (made,) = Vocoder(model, CPU, torch.bfloat16)(mel[None], int32([30]))
    assert noise_over_signal(wanted, made) < 0.1
    assert noise_over_signal(wanted, made) < noise_over_signal(wanted, reference(copy.deepcopy(model).bfloat16(), mel))


def test_float16_is_ten_decibels_nearer_to_float32_than_bfloat16(model: Qwen2_5OmniToken2WavBigVGANModel) -> None:
    (mel,) = mels_of([30])
    wanted = reference(model, mel)
    half, bfloat = (Vocoder(model, CPU, dtype)(mel[None], int32([30]))[0] for dtype in (torch.float16, torch.bfloat16))
    assert noise_over_signal(wanted, half) < noise_over_signal(wanted, bfloat) * 10 ** (-10 / 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resblock_kernel_sizes": [3, 7]}, r"2 residual blocks a stage \(resblock_kernel_sizes\), but only 3"),
        ({"upsample_kernel_sizes": [12, 7, 4, 4, 4, 4]}, r"upsamples by 5 with a kernel of 12"),
        ({"upsample_kernel_sizes": [11, 11, 4, 4, 4, 4]}, r"upsamples by 3 with a kernel of 11"),
        (
            {"upsample_rates": [5, 3, 2, 2, 1, 1], "upsample_kernel_sizes": [11, 7, 4, 4, 3, 3]},
            r"60 samples of a frame",
        ),
    ],
)
def test_a_bigvgan_of_another_build_is_refused(
    model: Qwen2_5OmniToken2WavBigVGANModel, change: dict[str, list[int]], message: str
) -> None:
    other = Qwen2_5OmniToken2WavBigVGANModel(type(model.config)(**{**model.config.to_dict(), **change}))
    with pytest.raises(ConfigError, match=message):
        Vocoder(other, CPU, torch.float32)


# ----------------------------------------------------------------- on the GPU


def random_snake(channels: int) -> Snake:
    bias, alpha, beta = torch.randn(3, channels, device="cuda") * 0.3
    return Snake(bias, alpha.exp() / torch.pi, beta.exp())


def on_cpu(snake: Snake) -> Snake:
    return Snake(snake.bias.cpu(), snake.frequency.cpu(), snake.gain.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("channels", "ends"), KERNEL_CASES)
def test_kernels_compute_what_torch_does(channels: int, ends: list[int], dtype: torch.dtype, rounding: float) -> None:
    hidden, residual = torch.randn(2, len(ends), max(ends), channels, device="cuda").to(dtype)
    for i, end in enumerate(ends):
        hidden[i, end:] = residual[i, end:] = float("nan")
    snake, limits = random_snake(channels), int32(ends).cuda()
    same = {"atol": 1e-5, "rtol": rounding}

    made = bigvgan.activate(hidden, snake, limits)
    wanted = bigvgan.activate(hidden.cpu(), on_cpu(snake), limits.cpu())
    torch.testing.assert_close(made.cpu(), wanted, **same)

    made, total = bigvgan.add_and_activate(hidden, residual, snake, limits)
    wanted, wanted_total = bigvgan.add_and_activate(hidden.cpu(), residual.cpu(), on_cpu(snake), limits.cpu())
    torch.testing.assert_close(made.cpu(), wanted, **same)
    for i, end in enumerate(ends):
        torch.testing.assert_close(total[i, :end].cpu(), wanted_total[i, :end], **same)

    branches = [(hidden, residual), (residual, residual), (hidden, hidden)]
    made = bigvgan.mean_of_blocks(branches, snake.bias, limits)
    wanted = bigvgan.mean_of_blocks([(a.cpu(), b.cpu()) for a, b in branches], snake.bias.cpu(), limits.cpu())
    torch.testing.assert_close(made.cpu(), wanted, **same)


@pytest.mark.gpu
def test_a_captured_call_replays_with_other_mels_and_lengths(
    model: Qwen2_5OmniToken2WavBigVGANModel, vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    on_gpu = Vocoder(model, torch.device("cuda"), torch.float32)
    mels, lengths = torch.zeros(3, 25, 80, device="cuda"), int32([25, 25, 25]).cuda()
    on_gpu(mels, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        waves = on_gpu(mels, lengths)

    mels.copy_(mels_of([25, 5, 1]))
    lengths.copy_(int32([25, 5, 1]))
    graph.replay()
    wanted = vocoder(mels.cpu(), lengths.cpu())
    for i, length in enumerate([25, 5, 1]):
        samples = length * SAMPLES_PER_FRAME
        torch.testing.assert_close(waves[i, :samples].cpu(), wanted[i, :samples], atol=2e-5, rtol=0)
