"""What the plan says that code2wav takes, against what it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_cluster.config.schema import Limits, PipelineConfig, StageConfig
from omni_cluster.memory.needs import sound_parts
from omni_cluster.models.qwen3_omni.code2wav import PASS_CODES
from omni_cluster.models.qwen3_omni.memory import code2wav_sizes, row_elements
from omni_cluster.models.qwen3_omni.options import Code2WavOptions
from omni_cluster.models.qwen3_omni.vocoder import load_vocoder
from omni_cluster.models.qwen3_omni.vocoder_pass import VocoderPass
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")


def pipeline(max_codec_tokens: int) -> PipelineConfig:
    stage = StageConfig(stage_id=0, model_stage="code2wav", num_gpus=0, final_output_type="audio")
    return PipelineConfig(
        model="m", family="toy", stages=[stage], limits=Limits(max_codec_tokens=max_codec_tokens)
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "codes"), [(1, PASS_CODES), (4, 32), (32, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plan_bounds_a_traced_pass_of_the_hubs_sizes(dtype: torch.dtype, batch: int, codes: int) -> None:
    config = Qwen3OmniMoeCode2WavConfig()
    with torch.device("meta"):
        work = VocoderPass(Qwen3OmniMoeCode2Wav._from_config(config)).to(dtype)
    tensors = work.tensors(batch, codes)
    with torch.inference_mode(), LiveBytes() as counted:
        work(tensors)
    traced = counted.peak / (batch * (work.reach.context + codes))
    assert traced <= row_elements(config) * dtype.itemsize <= 1.25 * traced


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_and_states_are_counted_as_they_are_loaded(qwen3_folder: Path, name: str, dtype: torch.dtype) -> None:
    vocoder = load_vocoder(qwen3_folder, CPU, dtype)
    fixed = sound_parts(pipeline(100), qwen3_folder, code2wav_sizes(qwen3_folder, Code2WavOptions(dtype=name)))
    assert fixed.weights == sum(weight.nbytes for weight in vocoder._work.parameters())
    stream = vocoder.stream()
    vocoder.take([stream], [np.zeros((40, 4), np.int16)])
    assert fixed.streams == Code2WavOptions().max_streams * (stream.state.kept.nbytes + stream.state.rows.nbytes)


def test_a_longer_answer_takes_more_for_its_sound_alone(qwen3_folder: Path) -> None:
    sizes = code2wav_sizes(qwen3_folder, Code2WavOptions(dtype="bfloat16"))
    short, long = (sound_parts(pipeline(codes), qwen3_folder, sizes).activations for codes in (5_000, 6_000))
    assert long - short == 1_000 * 1_920 * 4 * 3


@pytest.mark.parametrize("most", [0, PASS_CODES + 1])
def test_a_piece_is_never_larger_than_a_pass(most: int) -> None:
    with pytest.raises(ValueError, match="max_piece_codes"):
        Code2WavOptions(max_piece_codes=most)
