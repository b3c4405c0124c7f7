"""What the flow is trained on is what the sampler of transformers follows, and it can learn a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from tests.training.sayings import sayings_of, seconds_are_steps, voice
from training import flow
from training.code2wav import flowed
from training.code2wav_parts import DIT_SIZES, new_dit
from training.codes import SILENCE
from training.flow import BLOCK_CODES, MOST_BLOCKS, UNGUIDED, FlowBatches, FlowPlan, loss_of
from training.mel import SILENT

CPU = torch.device("cpu")


class Knowing(Qwen2_5OmniToken2WavDiTModel):
    """A DiT whose guided sum leads from any noise straight to `mels`; its unguided half is wrong by `by`."""

    def __init__(self, mels: torch.Tensor, by: float) -> None:
        super().__init__(Qwen2_5OmniDiTConfig(**DIT_SIZES))
        self._mels, self._by, self._noise = mels, by, torch.zeros_like(mels)

    def forward(self, hidden_states: Any, *given: Any, **named: Any) -> torch.Tensor:
        time = torch.as_tensor(named.get("time_step", given[-1] if given else None)).reshape(-1, 1, 1)
        if float(time.max()) < 0.999:
            self._noise = (hidden_states - time * self._mels) / (1 - time)
        wanted = self._mels - self._noise
        unguided = wanted + self._by
        return torch.cat([(wanted + flow.GUIDANCE_SCALE * unguided) / (1 + flow.GUIDANCE_SCALE), unguided])


def test_the_loss_is_least_where_the_sampler_makes_the_mel_frames() -> None:
    torch.manual_seed(0)
    codes, mels = torch.randint(2, 512, (1, 12)), torch.randn(1, 24, 80)
    given = voice()
    batch = (codes, mels, given["cond"][:, None].expand(-1, 24, -1), given["ref_mel"])
    knowing = Knowing(mels, by=2.0)
    assert float(loss_of(knowing, batch)) == pytest.approx(UNGUIDED * 2.0**2, rel=1e-3)
    made = flowed(knowing, codes[0].tolist(), given)
    torch.testing.assert_close(made, mels[0], atol=1e-3, rtol=0)


def test_a_batch_is_filled_up_with_silence_and_longer_sentences_are_cut_at_a_block() -> None:
    torch.manual_seed(0)
    codes, mels, conditions, references = FlowBatches(sayings_of(1, codes=20), CPU).draw(3)
    assert codes.shape == (3, 24) and mels.shape == (3, 48, 80)
    assert (codes[:, 20:] == SILENCE).all() and (mels[:, 40:] == SILENT).all() and (codes[:, :20] > SILENCE).all()
    assert conditions.shape == (3, 48, 192) and references.shape == (3, 100, 80)
    most, whole = MOST_BLOCKS * BLOCK_CODES, sayings_of(1, codes=170)
    codes, mels, *_ = FlowBatches(whole, CPU).draw(8)
    assert codes.shape == (8, most) and mels.shape == (8, 2 * most, 80)
    firsts = {int(string[0]) - 2 for string in codes}
    assert len(firsts) > 1 and firsts <= {0, BLOCK_CODES, 2 * BLOCK_CODES, 3 * BLOCK_CODES}
    for string, frames in zip(codes, mels, strict=True):
        first, length = int(string[0]) - 2, int((string != SILENCE).sum())
        wanted = torch.from_numpy(whole.mels[0][0][2 * first : 2 * (first + length)]).float()
        torch.testing.assert_close(frames[: 2 * length], wanted)


def test_it_learns_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sayings = sayings_of(1, codes=12)
    with seconds_are_steps(monkeypatch):
        flow.train(FlowPlan(out=tmp_path, minutes=120 / 60, batch=1), sayings)
    dit = new_dit().eval()
    dit.load_state_dict(torch.load(tmp_path / "flow.pt", weights_only=True)["parts"]["model"])
    wanted = torch.from_numpy(sayings.mels[0][0]).float()
    errors = []
    for codes in (sayings.codes[0].tolist(), sayings.codes[0][::-1].tolist()):
        with torch.inference_mode():
            errors.append(float((flowed(dit, codes, sayings.voices["Ethan"]) - wanted).abs().mean()))
    assert errors[0] < 0.7 * float((wanted - wanted.mean()).abs().mean())
    assert errors[0] < 0.9 * errors[1], "the same codes from the end on sound otherwise"
