"""Embeddings of sounds are transformers' to the bit, whatever lengths come together."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from omni_cluster.models.qwen2_5_omni import audio_tower
from omni_cluster.models.qwen2_5_omni.audio_tower import Hearing, LayerInputs

MEL_BINS = 16
WINDOW = 200
"""Mel frames."""
LENGTHS = [
    pytest.param([WINDOW], id="one window"),
    pytest.param([3 * WINDOW], id="windows without a rest"),
    pytest.param([30], id="less than a window"),
    pytest.param([2 * WINDOW + 1], id="a rest of one frame"),
    pytest.param([3 * WINDOW, 2 * WINDOW, WINDOW], id="sounds whose windows are alike"),
    pytest.param([37, 5 * WINDOW, 415, WINDOW, 37, 37], id="sounds of many lengths"),
]


def made_tower() -> Qwen2_5OmniAudioEncoder:
    torch.manual_seed(0)
    config = Qwen2_5OmniAudioEncoderConfig(
        num_mel_bins=MEL_BINS,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        output_dim=24,
        n_window=WINDOW // 2,
    )
    return Qwen2_5OmniAudioEncoder(config).eval()


def of_transformers(
    tower: Qwen2_5OmniAudioEncoder, features: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    after_cnn, tokens = tower._get_feat_extract_output_lengths(lengths)
    made = tower(features, feature_lens=lengths, aftercnn_lens=after_cnn)
    return made.last_hidden_state.split(tokens.tolist())


@torch.inference_mode()
@pytest.mark.parametrize("frames", LENGTHS)
def test_embeddings_are_those_of_transformers(frames: list[int]) -> None:
    stock, ours = made_tower(), made_tower()
    hearing = Hearing(ours)
    hearing.capture()  # nothing on a CPU
    assert ours.state_dict().keys() == stock.state_dict().keys()
    features, lengths = torch.randn(MEL_BINS, sum(frames)), torch.tensor(frames)
    wanted, got = of_transformers(stock, features, lengths), hearing(features, lengths)
    assert len(got) == len(frames)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


@torch.inference_mode()
@pytest.mark.parametrize("frames", LENGTHS)
def test_windows_of_one_length_are_attended_together(frames: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hearing, shapes = Hearing(made_tower()), []
    attend = audio_tower.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(audio_tower, "scaled_dot_product_attention", counted)
    hearing(torch.randn(MEL_BINS, sum(frames)), torch.tensor(frames))
    rests = [[frames % WINDOW] if frames % WINDOW else [] for frames in frames]
    windows = [w for n, rest in zip(frames, rests, strict=True) for w in [WINDOW] * (n // WINDOW) + rest]
    runs = [((length - 1) // 2 + 1, len(list(same))) for length, same in groupby(windows)]
    assert shapes == 2 * [(count, 4, length, 8) for length, count in runs]


def test_captured_layers_get_windows_of_zeros_behind_the_last_position() -> None:
    inputs = LayerInputs(torch.full((256, 2), torch.nan), torch.zeros(8, dtype=torch.int32))
    assert inputs.put(torch.ones(120, 2), [0, 100, 120], window=100)
    assert inputs.begins.tolist() == [0, 100, 120, 220, 256, 256, 256, 256]
    assert torch.equal(inputs.hidden, torch.cat([torch.ones(120, 2), torch.zeros(136, 2)]))


def test_windows_find_no_room_in_captured_layers() -> None:
    begins = list(range(0, 35, 5))
    for room in (6, 7, 8):
        inputs = LayerInputs(torch.zeros(30, 2), torch.zeros(room, dtype=torch.int32))
        assert inputs.put(torch.ones(30, 2), begins, window=100) is (room > 7)


CLOSE = 0.02
"""Relative error between two ways of rounding to bfloat16."""


def captured() -> Hearing:
    """On the card, in half precision."""
    hearing = Hearing(made_tower().to("cuda", torch.bfloat16))
    hearing.capture()
    return hearing


def on_card(frames: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(frames))
    return torch.randn(MEL_BINS, sum(frames), generator=generator).to("cuda"), torch.tensor(frames)


MANY = [pytest.param([9] * 60, id="more sounds than there is room for"), pytest.param([5000], id="longer than a graph")]


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("frames", [*LENGTHS, *MANY])
def test_captured_layers_make_what_transformers_makes(frames: list[int]) -> None:
    features, lengths = on_card(frames)
    wanted = of_transformers(made_tower().to("cuda", torch.bfloat16), features.bfloat16(), lengths.to("cuda"))
    for mine, theirs in zip(captured()(features, lengths), wanted, strict=True):
        assert mine.shape == theirs.shape and torch.dist(mine.float(), theirs.float()) < CLOSE * theirs.float().norm()


@pytest.mark.gpu
@torch.inference_mode()
def test_nothing_is_left_of_earlier_sounds() -> None:
    hearing, (features, lengths) = captured(), on_card([3 * WINDOW + 37])
    (before,) = (each.clone() for each in hearing(features, lengths))
    hearing(torch.full((MEL_BINS, 4 * WINDOW), torch.nan, device="cuda"), torch.tensor([4 * WINDOW]))
    assert torch.equal(hearing(features, lengths)[0], before) and not before.isnan().any()


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("frames", [[5 * WINDOW, 37], [50 * WINDOW]], ids=["captured", "longer than a graph"])
def test_the_card_is_asked_for_nothing(frames: list[int]) -> None:
    hearing, (features, lengths) = captured(), on_card(frames)
    hearing(features, lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        embeddings = hearing(features, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each) for each in embeddings] == [audio_tower.sound_tokens(n) for n in frames]
