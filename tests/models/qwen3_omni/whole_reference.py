"""transformers' whole Qwen3-Omni, greedy and in float32."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from omni_cluster.types.inputs import Media
from tests.models.qwen3_omni.thinker_reference import (
    ThinkerReference,
    are_heard,
    each_sound_alone,
    media_of,
    prompt_text,
)

MAX_TOKENS, MAX_CODES = 16, 30


@dataclass(frozen=True)
class Spoken:
    """A reply of transformers': its tokens, the codes of its sound `[n, Q]`, and the sound."""

    prompt_ids: list[int]
    token_ids: list[int]
    codes: np.ndarray
    sound: np.ndarray


class Reference:
    """transformers' own model of a checkpoint; replies are made once for each kind and voice."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._model, self._thinker = model, ThinkerReference(folder, model)
        self._made: dict[tuple[str, str], Spoken] = {}

    def speak(self, kind: str, voice: str) -> Spoken:
        if (kind, voice) not in self._made:
            self._made[kind, voice] = self.reply(prompt_text(kind), media_of(kind), voice)
        return self._made[kind, voice]

    def decoded(self, token_ids: list[int]) -> str:
        text: str = self._thinker.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def spoken(self, text: str, reply_ids: Sequence[int], voice: str) -> Spoken:
        """As if the thinker had replied so, and then ended."""
        prompt = len(self._thinker.inputs(text, Media())["input_ids"][0])
        ids = [*reply_ids, self._model.config.im_end_token_id]
        forced = {"prefix_allowed_tokens_fn": lambda _, so_far: [ids[len(so_far) - prompt]], "max_new_tokens": len(ids)}
        return self.reply(text, Media(), voice, **{f"thinker_{name}": value for name, value in forced.items()})

    @torch.inference_mode()
    def reply(self, text: str, given: Media, voice: str, **generating: Any) -> Spoken:
        inputs, decode, seen = self._thinker.inputs(text, given), self._model.code2wav, []

        def noted(codes: torch.Tensor, **_: Any) -> torch.Tensor:
            """Without the seams of `chunked_decode`, which long sound would have."""
            seen.append(codes)
            sound: torch.Tensor = decode(codes)
            return sound

        heard, talker = are_heard(given.videos), self._model.talker
        positions = functools.partial(_with_sound, talker.get_rope_index) if heard else talker.get_rope_index
        with (
            each_sound_alone(self._model.thinker),
            patch.object(decode, "chunked_decode", noted),
            patch.object(talker, "get_rope_index", positions),
        ):
            made, sound = self._model.generate(
                **inputs, speaker=voice, **{"thinker_max_new_tokens": MAX_TOKENS, **generating},
                talker_max_new_tokens=MAX_CODES, use_audio_in_video=heard,
                thinker_do_sample=False, talker_do_sample=False,
            )  # fmt: skip
        prompt = inputs["input_ids"][0].tolist()
        (codes,) = seen
        return Spoken(prompt, made[0, len(prompt) :].tolist(), codes[0].T.numpy(), sound.flatten().numpy())


def _with_sound(rope_index: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`generate` forgets to tell the talker that a video's sound is in it."""
    names = inspect.signature(rope_index).parameters
    asked = {**dict(zip(names, args, strict=False)), **kwargs}
    return rope_index(**{**asked, "use_audio_in_video": True})
