"""Voice activity detection: Silero's model says of each window how likely it is speech, a detector where turns are."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from omni_cluster.openai_api.realtime.session import SemanticVad, ServerVad
from omni_cluster.openai_api.realtime.sound import HEARD_HZ

WINDOW: Final = 512
"""Samples at 16 kHz of which the model says one likelihood: 32 ms."""
CONTEXT: Final = 64
"""Samples before a window that the model is shown with it."""
STATE: Final = (2, 1, 128)
STARTS_AFTER: Final = 2
"""Windows of speech in a row that begin a turn, 64 ms. Knocks, tones and noise of up to 0.25 s have not one."""
HYSTERESIS: Final = 0.15
"""By which a likelihood is below the threshold where silence begins."""
PAUSES_AFTER: Final = 5
"""Windows of silence after which an answer is begun: most of them are the end of a turn.

A likelihood falls 30 to 100 ms after the speech does, so 160 ms of windows are some 200 ms of silence.
"""
Change = Literal["started", "paused", "resumed", "stopped"]
USUAL_THRESHOLD: Final = 0.5
WAITS_MS: Final = {"high": 300, "medium": 600, "auto": 600, "low": 1_200}
"""Of `semantic_vad`: silence after which a turn is over. No model here tells whether a sentence is."""


class SpeechModel:
    """Silero's weights, once for all sessions of a process: a stream's state is outside of them."""

    def __init__(self) -> None:
        import onnxruntime  # a quarter of a second, which a server without sessions does not take

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(_weights()), sess_options=options, providers=["CPUExecutionProvider"]
        )

    def step(self, window: npt.NDArray[np.float32], state: npt.NDArray[np.float32]) -> tuple[float, Any]:
        """`window`: float32 `[CONTEXT + WINDOW]`. Returns the likelihood of speech, and the next state."""
        inputs = {"input": window[None], "state": state, "sr": np.array(HEARD_HZ, np.int64)}
        likelihood, after = self._session.run(None, inputs)
        return float(likelihood[0, 0]), after


def _weights() -> Path:
    """Its package would import torch, and set its threads."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("silero_vad is not installed, which has the weights of voice activity detection.")
    return Path(spec.origin).parent / "data" / "silero_vad.onnx"


@functools.cache
def speech_model() -> SpeechModel:
    """The process's one; it is loaded by the first session that asks."""
    return SpeechModel()


class SpeechStream:
    """One stream of sound, window by window."""

    def __init__(self, model: SpeechModel) -> None:
        self._model = model
        self._state = np.zeros(STATE, np.float32)
        self._context = np.zeros(CONTEXT, np.float32)
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: npt.NDArray[np.float32]) -> Iterator[float]:
        """The likelihood of speech in each further window, of float32 samples at 16 kHz."""
        held = np.concatenate([self._rest, samples])
        for start in range(0, len(held) - WINDOW + 1, WINDOW):
            window = np.concatenate([self._context, held[start : start + WINDOW]])
            likelihood, self._state = self._model.step(window, self._state)
            self._context = window[-CONTEXT:]
            yield likelihood
        self._rest = held[len(held) - len(held) % WINDOW :]


class TurnDetector:
    """Where turns begin and end, by the likelihoods of windows one after the other."""

    def __init__(self, settings: ServerVad | SemanticVad) -> None:
        if isinstance(settings, ServerVad):
            self._threshold, silence_ms = settings.threshold, settings.silence_duration_ms
        else:
            self._threshold, silence_ms = USUAL_THRESHOLD, WAITS_MS[settings.eagerness]
        # Whole windows: what is left of the last one is less than a likelihood is late.
        self._ends_after = max(1, silence_ms * HEARD_HZ // (1000 * WINDOW))
        self._spoken = 0
        self._silent = 0
        self.is_speaking = False

    def push(self, likelihood: float) -> Change | None:
        """What the next window changes. A turn began `STARTS_AFTER` windows before it is said.

        A pause may be the turn's end, if it is not "resumed"; a turn that waits for less silence has none.
        """
        if not self.is_speaking:
            self._spoken = self._spoken + 1 if likelihood >= self._threshold else 0
            if self._spoken < STARTS_AFTER:
                return None
            self.is_speaking, self._silent = True, 0
            return "started"
        return self._within(likelihood)

    def _within(self, likelihood: float) -> Change | None:
        if likelihood >= self._threshold:
            was_paused, self._silent = self._silent >= PAUSES_AFTER, 0
            return "resumed" if was_paused else None
        if self._silent or likelihood < self._threshold - HYSTERESIS:
            self._silent += 1
        if self._silent >= self._ends_after:
            self.reset()
            return "stopped"
        return "paused" if self._silent == PAUSES_AFTER else None

    def reset(self) -> None:
        """A turn that had begun is none."""
        self.is_speaking, self._spoken = False, 0
