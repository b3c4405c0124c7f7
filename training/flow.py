"""Trains the flow of code2wav: from codes and a voice to mel frames.

    python -m training.flow --out .cache/wave --minutes 8

The sampler of transformers starts from noise at time 0 and follows `1.5 guided - 0.5 unguided` to time 1. That sum is
what is trained: it goes straight from the noise to the mel frames. The unguided half knows no code and no voice. It
learns to go there by itself as well as it can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavDiTModel

from training.average import Average
from training.code2wav_parts import new_dit
from training.codes import SILENCE
from training.mel import BINS, FRAMES_A_CODE, SILENT
from training.run import Plan, Run, descend, given_options, run_options
from training.wave_data import Sayings

GUIDANCE_SCALE = 0.5
"""Of transformers' sampler, and of this project's."""
HIGHEST_RATE = 2e-3
UNGUIDED = 0.1
"""Weight of the unguided half's own loss."""
BLOCK_CODES = 12
MOST_BLOCKS = 12
"""Of a sentence in a batch: a longer one is cut at a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlan(Plan):
    """`out` has the sentences, too. `batch`: sentences of a step."""

    batch: int = 64


class FlowBatches:
    """Codes, mel frames and voices of random sentences, filled up with silence."""

    def __init__(self, sayings: Sayings, device: torch.device) -> None:
        self._device, self._sayings = device, sayings
        self._codes = [torch.from_numpy(codes).long() for codes in sayings.codes]
        self._conditions = torch.cat([voice["cond"] for voice in sayings.voices.values()]).to(device)
        self._references = torch.cat([voice["ref_mel"] for voice in sayings.voices.values()]).to(device)

    def draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes `[B, n]`, mels `[B, 2 n, 80]`, conditions `[B, 2 n, 192]`, reference mels."""
        chosen = torch.randint(len(self._codes), (size,)).tolist()
        voice = torch.randint(len(self._sayings.mels), (size,))
        blocks = min(MOST_BLOCKS, max(-(-len(self._codes[i]) // BLOCK_CODES) for i in chosen))
        codes = torch.full((size, blocks * BLOCK_CODES), SILENCE)
        mels = torch.full((size, blocks * BLOCK_CODES * FRAMES_A_CODE, BINS), SILENT)
        for row, (i, v) in enumerate(zip(chosen, voice.tolist(), strict=True)):
            first = self._first_code(len(self._codes[i]), blocks)
            part = self._codes[i][first : first + blocks * BLOCK_CODES]
            codes[row, : len(part)] = part
            frames = slice(first * FRAMES_A_CODE, (first + len(part)) * FRAMES_A_CODE)
            mels[row, : len(part) * FRAMES_A_CODE] = torch.from_numpy(self._sayings.mels[v][i][frames]).float()
        voice = voice.to(self._device)
        conditions = self._conditions[voice][:, None].expand(-1, mels.shape[1], -1)
        return codes.to(self._device), mels.to(self._device), conditions, self._references[voice]

    def _first_code(self, codes: int, blocks: int) -> int:
        spare = -(-codes // BLOCK_CODES) - blocks
        return BLOCK_CODES * int(torch.randint(spare + 1, ())) if spare > 0 else 0


def loss_of(
    dit: Qwen2_5OmniToken2WavDiTModel,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    codes, mels, conditions, references = batch
    noise, time = torch.randn_like(mels), torch.rand(len(mels), device=mels.device)
    state = torch.lerp(noise, mels, time[:, None, None])
    made = dit(state, references, conditions, codes, time, apply_cfg=True)
    guided, unguided = made.chunk(2)
    target = mels - noise
    summed = guided + (guided - unguided) * GUIDANCE_SCALE
    return (summed - target).square().mean() + UNGUIDED * (unguided - target).square().mean()


def train(plan: FlowPlan, sayings: Sayings) -> None:
    torch.manual_seed(plan.seed)
    device = torch.device(plan.device)
    dit = new_dit().to(device)
    optimizer = torch.optim.AdamW(dit.parameters(), HIGHEST_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    average, batches = Average(dit), FlowBatches(sayings, device)
    run = Run("flow", plan, {"model": dit, "optimizer": optimizer, "average": average})
    for _ in run.steps():
        rate, loss = run.rate(HIGHEST_RATE), loss_of(dit, batches.draw(plan.batch))
        descend(optimizer, [loss], rate, longest=1.0)
        average.update()
        run.tell(loss=loss, rate=rate)


def main() -> None:
    parser = run_options("Trains the flow of code2wav.")
    parser.add_argument("--batch", type=int)
    plan = FlowPlan(**given_options(parser))
    train(plan, Sayings.load(plan.out))


if __name__ == "__main__":
    main()
