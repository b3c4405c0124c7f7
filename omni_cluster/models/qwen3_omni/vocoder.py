"""Codes to waveform by a causal network, piece by piece: the joined pieces are what one decode of all codes gives.

A transformer makes a row of each code, and transposed convolutions make samples of the rows. Each of these cuts as much
off the end as off the beginning, so that a sample may wait for the code behind its own, and L codes give
`samples_per_code * L - missing_samples`. What a stream keeps is bounded: keys and values of the codes that the
transformer's window reaches, and the last rows, which the convolutions see again before new ones. Their own tails would
spare these rows, some 65 us of arithmetic a piece at a card's bound, but take three more kernels for each of twenty
convolutions, and a state of each. That is by count; neither was measured on a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_cluster.models.checkpoint_files import load_tensors, read_config
from omni_cluster.models.qwen3_omni.vocoder_pass import Passes, StreamState, VocoderPass
from omni_cluster.types.errors import PayloadError


def load_vocoder(folder: Path, device: torch.device, dtype: torch.dtype, captures: bool = False) -> Vocoder:
    """The code2wav of a checkpoint, on CUDA with graphs of usual passes if `captures`."""
    config = Qwen3OmniMoeCode2WavConfig(**read_config(folder)["code2wav_config"])
    with torch.device(device):
        model = Qwen3OmniMoeCode2Wav._from_config(config, dtype=torch.float32)
    model.load_state_dict(load_tensors(folder, "code2wav.", device))
    return Vocoder(model.eval(), dtype, captures)


class VocoderStream:
    """The codes of one request, and how far its sound is."""

    def __init__(self, state: StreamState) -> None:
        self.state = state


class Vocoder:
    """Waveforms of streams, of any ages and of pieces of any lengths."""

    def __init__(self, model: Qwen3OmniMoeCode2Wav, dtype: torch.dtype, captures: bool = False) -> None:
        """Takes the float32 `model` over."""
        self._config = model.config
        with torch.inference_mode():
            self._work = VocoderPass(model).to(dtype)
            self._passes = Passes(self._work, captures)
        self.reach = self._work.reach

    def stream(self) -> VocoderStream:
        """One that has had no codes."""
        return VocoderStream(self._work.new_state())

    def check(self, codes: np.ndarray) -> None:
        """Raises PayloadError: on a device, an index behind a table's end is the end of all that runs there."""
        codebooks, largest = self._config.num_quantizers, self._config.codebook_size - 1
        if codes.ndim != 2 or codes.shape[1] != codebooks:
            raise PayloadError(f"Codes have the shape {list(codes.shape)}; they are [n, {codebooks}].")
        if not np.issubdtype(codes.dtype, np.integer):
            raise PayloadError(f"Codes are {codes.dtype}; they are integers.")
        wrong = codes[(codes < 0) | (codes > largest)]
        if len(wrong):
            raise PayloadError(f"Codes have {wrong[0]} among them; they are from 0 to {largest}.")

    @torch.inference_mode()
    def take(self, streams: Sequence[VocoderStream], codes: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """All samples `[-1, 1]` that each stream's next codes `[n, Q]` allow, at most `PASS_CODES` of them; nothing is
        held back.

        Raises PayloadError for invalid codes. When it raises, all streams are as they were before.
        """
        for each in codes:
            self.check(each)
        made = self._passes([stream.state for stream in streams], codes)
        for stream, (_, state) in zip(streams, made, strict=True):
            stream.state = state
        return [wave for wave, _ in made]
