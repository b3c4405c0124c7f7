"""transformers' spoken replies on the tiny checkpoint, greedy in float32, and what its talker is given for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3OmniMoeProcessor

from omni_cluster.models.qwen3_omni.fine_positions import packed
from omni_cluster.models.qwen3_omni.talker_ids import TalkerIds
from omni_cluster.models.qwen3_omni.talker_prompt import user_turns
from omni_cluster.types.outputs import StageChunk
from omni_cluster.types.rows import Rows

KINDS = ("text", "audio", "image", "video", "audio+image", "turns", "odd", "odd turns")
"""Of "turns": a system turn, and turns of both before the last question, with media in two of them. Frames of the odd
ones are at positions between whole ones."""
ROWS = "layer"
"""The kind of rows that stand for the thinker's."""
MAX_TOKENS = 12
MAX_CODES = 30

_AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_TURNS = {
    "text": [("user", "Hello world.")],
    "audio": [("user", f"{_AUDIO}What is it?")],
    "image": [("user", f"What is in {_IMAGE} the picture?")],
    "video": [("user", f"{_VIDEO}Hello.")],
    "audio+image": [("system", "You are a helpful assistant."), ("user", f"{_AUDIO}{_IMAGE}Hello.")],
    "turns": [
        ("system", "You are a helpful assistant."),
        ("user", f"{_IMAGE}What is it?"),
        ("assistant", "a picture"),
        ("user", "Hello"),
        ("assistant", "Hello world"),
        ("user", f"And what is this? {_AUDIO}"),
    ],
    "odd": [("user", f"{_VIDEO}Hello.")],
    "odd turns": [
        ("system", "You are a helpful assistant. " * 3),
        ("user", f"{_VIDEO}What is it?"),
        ("assistant", "a picture"),
        ("user", f"And what is this? {_VIDEO}Tell me all that you see in it."),
    ],
}


@dataclass(frozen=True)
class Spoken:
    """A reply of P + K tokens, P of them the prompt's.

    `embeds` `[n, H]` and `positions` float32 `[3, n]`: of the talker's prompt; `following`: that of the first code.
    `stream` `[m, H]`: what its codes are fed beside their own embeddings, before pads. `tokens`: codes of the first
    codebook; `frames`: of all, but for the last token, whose residual codes transformers never makes. `least_margin`:
    between the two largest logits of a token. `hidden` `[P, width]`: of the layer that media give, `is_media` and
    `is_user` bool `[P]`.
    """

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    embeds: torch.Tensor
    positions: np.ndarray
    following: float
    stream: torch.Tensor
    pad: torch.Tensor
    frames: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    hidden: torch.Tensor
    is_media: np.ndarray
    is_user: np.ndarray
    least_margin: float

    def rows(self) -> Rows:
        """Of the prompt's media alone, as the thinker's stage emits them."""
        rows, positions = self.hidden[torch.from_numpy(self.is_media)], np.zeros((3, len(self.prompt_ids)), np.float32)
        positions[:, self.is_user] = self.positions[:, : int(self.is_user.sum())]
        return Rows.of(ROWS, 0, rows, packed(positions), mask=self.is_media)

    def chunks(self) -> list[StageChunk]:
        """The reply in the thinker stage's words, a token a chunk."""
        first = StageChunk(0, self.reply_ids[:1], rows=self.rows(), prompt_token_ids=self.prompt_ids)
        later = [StageChunk(i, (token,)) for i, token in enumerate(self.reply_ids[1:-1], start=1)]
        last = StageChunk(len(self.reply_ids) - 1, self.reply_ids[-1:], finish_reason="length")
        return [first, *later, last]


def prompt_of(kind: str) -> str:
    turns = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in _TURNS[kind])
    return f"{turns}<|im_start|>assistant\n"


def media_of(kind: str) -> dict[str, Any]:
    """As transformers' processor takes them."""
    text, media, dice = prompt_of(kind), dict[str, Any](), np.random.RandomState(len(kind))
    if _AUDIO in text:
        media["audio"] = [dice.uniform(-0.3, 0.3, 20_000).astype(np.float32)]
    if _IMAGE in text:
        media["images"] = [Image.fromarray(dice.randint(0, 255, (32, 48, 3)).astype(np.uint8))]
    if _VIDEO in text:
        media["videos"] = [dice.randint(0, 255, (4, 32, 40, 3)).astype(np.uint8) for _ in range(text.count(_VIDEO))]
        # The processor scales small videos up, to thousands of positions.
        media["videos_kwargs"] = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "do_sample_frames": False}
        if kind.startswith("odd"):
            media["videos_kwargs"]["fps"] = 1.5
    return media


class Speaker:
    """The whole model; replies are made once for each kind and voice."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self._processor = Qwen3OmniMoeProcessor.from_pretrained(folder)
        self._made: dict[tuple[str, str, int], Spoken] = {}
        # Its talker reads the encoder's sizes where it has none, for sound beside pictures.
        model.talker.config.audio_config = model.config.thinker_config.audio_config

    def speak(self, kind: str, voice: str = "ethan", max_tokens: int = MAX_TOKENS) -> Spoken:
        key = (kind, voice, max_tokens)
        if key not in self._made:
            self._made[key] = self._spoken(kind, voice, max_tokens)
        return self._made[key]

    @torch.inference_mode()
    def _spoken(self, kind: str, voice: str, max_tokens: int) -> Spoken:
        inputs = self._processor(text=prompt_of(kind), return_tensors="pt", **media_of(kind))
        with self._observed() as seen:
            self.model.generate(
                **inputs, speaker=voice, thinker_max_new_tokens=max_tokens, talker_max_new_tokens=MAX_CODES,
                thinker_do_sample=False, talker_do_sample=False, talker_output_scores=True,
            )  # fmt: skip
        prompt, config = inputs["input_ids"][0], self.model.config
        thinker, thinker_config = seen["thinker"], config.thinker_config
        of_talker, talker = seen["of_talker"], seen["talker"]
        media = [thinker_config.audio_token_id, thinker_config.image_token_id, thinker_config.video_token_id]
        codes = [state[1][0].tolist() for state in talker.hidden_states if state[1] is not None]
        best = torch.cat(talker.scores).topk(2).values
        return Spoken(
            prompt_ids=tuple(prompt.tolist()),
            reply_ids=tuple(thinker.sequences[0, len(prompt) :].tolist()),
            embeds=of_talker["inputs_embeds"][0],
            positions=seen["positions"][0][-3:, 0].float().numpy(),
            following=float(seen["positions"][1][-1, 0, 0]),
            stream=of_talker["trailing_text_hidden"][0],
            pad=of_talker["tts_pad_embed"][0, 0],
            frames=tuple(map(tuple, codes)),
            tokens=tuple(talker.sequences[0].tolist()),
            hidden=thinker.hidden_states[0][config.talker_config.accept_hidden_layer][0],
            is_media=torch.isin(prompt, torch.tensor(media)).numpy(),
            is_user=user_turns(prompt.numpy(), TalkerIds.from_config(config.to_dict()).text),
            least_margin=float((best[:, 0] - best[:, 1]).min()),
        )

    @contextmanager
    def _observed(self) -> Iterator[dict[str, Any]]:
        """What thinker and talker answer, what the talker is given, and the positions of its prompt."""
        seen, model = dict[str, Any](), self.model

        def noting(name: str, generate: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                seen[f"of_{name}"] = kwargs
                seen[name] = generate(*args, **kwargs)
                return seen[name]

            return noted

        def note_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen.setdefault("positions", []).append(kwargs["position_ids"])

        hook = model.talker.model.register_forward_pre_hook(note_positions, with_kwargs=True)
        try:
            with (
                patch.object(model.thinker, "generate", noting("thinker", model.thinker.generate)),
                patch.object(model.talker, "generate", noting("talker", model.talker.generate)),
            ):
                yield seen
        finally:
            hook.remove()
