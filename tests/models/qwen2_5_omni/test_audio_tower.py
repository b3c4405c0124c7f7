"""Embeddings of sounds are transformers' to the bit, whatever lengths come together."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

from omni_cluster.models.qwen2_5_omni import audio_tower

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
    audio_tower.attend_windows_together(ours)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    features, lengths = torch.randn(MEL_BINS, sum(frames)), torch.tensor(frames)
    wanted, got = of_transformers(stock, features, lengths), audio_tower.heard(ours, features, lengths)
    assert len(got) == len(frames)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)


@torch.inference_mode()
@pytest.mark.parametrize("frames", LENGTHS)
def test_windows_of_one_length_are_attended_together(frames: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tower, shapes = made_tower(), []
    audio_tower.attend_windows_together(tower)
    attend = audio_tower.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(audio_tower, "scaled_dot_product_attention", counted)
    audio_tower.heard(tower, torch.randn(MEL_BINS, sum(frames)), torch.tensor(frames))
    rests = [[frames % WINDOW] if frames % WINDOW else [] for frames in frames]
    windows = [w for n, rest in zip(frames, rests, strict=True) for w in [WINDOW] * (n // WINDOW) + rest]
    runs = [((length - 1) // 2 + 1, len(list(same))) for length, same in groupby(windows)]
    assert shapes == 2 * [(count, 4, length, 8) for length, count in runs]


@pytest.mark.gpu
@torch.inference_mode()
def test_the_card_is_asked_for_nothing() -> None:
    tower = made_tower().to("cuda", torch.bfloat16)
    audio_tower.attend_windows_together(tower)
    features, lengths = torch.randn(MEL_BINS, 5 * WINDOW + 37, device="cuda"), torch.tensor([5 * WINDOW, 37])
    audio_tower.heard(tower, features, lengths)
    torch.cuda.set_sync_debug_mode("error")
    try:
        embeddings = audio_tower.heard(tower, features, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each) for each in embeddings] == [250, 9]
