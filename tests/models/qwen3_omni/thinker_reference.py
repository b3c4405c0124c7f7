"""transformers' thinker on the tiny checkpoint: what it makes of the media of `tests/reference.py`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import BatchFeature, Qwen3OmniMoeProcessor

from omni_cluster.types.inputs import Media, OmniRequest, Video
from tests.reference import VIDEO_KINDS, Audio, media, synthetic_video, videos

SEEN_KINDS = (*VIDEO_KINDS, "odd", "odd-heard")
"""Of videos; frames of the odd ones are at positions between whole ones."""

_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_MARKS = {
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    **dict.fromkeys(("video", "slow", "heard", "heard-slow", "heard-short", "odd", "odd-heard"), _VIDEO),
}


@dataclass(frozen=True)
class Thought:
    """P prompt ids, K generated ids.

    rows: float32 `[P, H]`, what enters the accepted layer; is_media: bool `[P]`. positions: float32 `[3, P]`, as the
    model was given them; following: that of the first token. is_user: bool `[P]`, the user's turns; talker_positions:
    float32 `[3, n]`, of these and the nine positions behind them. min_margin: the least gap between the two largest
    logits of a step.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    rows: torch.Tensor
    is_media: np.ndarray
    positions: np.ndarray
    following: float
    is_user: np.ndarray
    talker_positions: np.ndarray
    min_margin: float


def prompt_text(kind: str, question: str = "Hello world, describe it.") -> str:
    marks = "".join(_MARKS[part] for part in ([] if kind == "text" else kind.split("+")))
    return f"{_SYSTEM}<|im_start|>user\n{marks}{question}<|im_end|>\n<|im_start|>assistant\n"


def media_of(kind: str) -> Media:
    if kind.startswith("odd"):
        return Media(videos=(synthetic_video(6, fps=1.5, audio_s=4.0 if kind == "odd-heard" else None, seed=5),))
    audios, images = media(kind)
    return Media(tuple(audios), tuple(images), tuple(videos(kind)))


def request(request_id: str, kind: str = "text", **fields: Any) -> OmniRequest:
    """The request that the reference was given as `prompt_text(kind)` with `media_of(kind)`."""
    return OmniRequest(request_id, prompt_text(kind), media_of(kind), **fields)


class ThinkerReference:
    """The thinker of a model of transformers.

    Of several sounds it makes features and embeddings that depend on the longest of them, up to which it fills the
    others: here it is given each alone.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self.processor = Qwen3OmniMoeProcessor.from_pretrained(folder)
        self.model = model
        config = model.config.thinker_config
        # Its talker reads the encoder's sizes where it has none, for sound beside pictures.
        model.talker.config.audio_config = config.audio_config
        self._pads = [config.audio_token_id, config.image_token_id, config.video_token_id]

    @torch.inference_mode()
    def think(self, text: str, given: Media, max_new_tokens: int) -> Thought:
        """Greedy text; ends after the eos id, which is then the last of `token_ids`, or after `max_new_tokens`."""
        inputs, seen = self.inputs(text, given), []
        thinker = self.model.thinker
        hook = thinker.model.rotary_emb.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        with each_sound_alone(thinker):
            made = thinker.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=False, use_audio_in_video=are_heard(given.videos),
                return_dict_in_generate=True, output_logits=True, output_hidden_states=True,
            )  # fmt: skip
        hook.remove()
        prompt_ids = inputs["input_ids"][0].tolist()
        return Thought(
            prompt_ids=prompt_ids,
            token_ids=made.sequences[0, len(prompt_ids) :].tolist(),
            rows=made.hidden_states[0][self.model.config.talker_config.accept_hidden_layer][0],
            is_media=np.isin(prompt_ids, self._pads),
            positions=seen[0][:, 0].float().numpy(),
            following=float(seen[1][0, 0, 0]),
            is_user=self._user_turns(prompt_ids),
            talker_positions=self._talker_positions(inputs, given),
            min_margin=min(_margin(logits[0]) for logits in made.logits),
        )

    def positions(self, inputs: dict[str, Any], given: Media) -> np.ndarray:
        """float32 `[3, P]`, of what `inputs` gave."""
        return self._positions(self.model.thinker, inputs["input_ids"], inputs, given)

    def _talker_positions(self, inputs: dict[str, Any], given: Media) -> np.ndarray:
        """As `generate` asks for them, which forgets to say that a video's sound is in it."""
        prompt = inputs["input_ids"]
        own = prompt[:, self._user_turns(prompt[0].tolist())]
        answer = torch.full((1, 9), self.model.config.tts_pad_token_id)
        return self._positions(self.model.talker, torch.cat([own, answer], dim=1), inputs, given)

    def _user_turns(self, prompt_ids: list[int]) -> np.ndarray:
        config, role, made = self.model.config, 0, list[bool]()
        for token, following in pairwise([*prompt_ids, 0]):
            role = following if token == config.im_start_token_id else role
            made.append(role == config.user_token_id)
        return np.array(made)

    def _positions(self, model: Any, ids: torch.Tensor, inputs: dict[str, Any], given: Media) -> np.ndarray:
        mask = inputs.get("feature_attention_mask")
        positions, _ = model.get_rope_index(
            ids, inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), torch.ones_like(ids),
            are_heard(given.videos), None if mask is None else mask.sum(1), inputs.get("video_second_per_grid"),
        )  # fmt: skip
        made: np.ndarray = positions[:, 0].float().numpy()
        return made

    def inputs(self, text: str, given: Media) -> dict[str, Any]:
        """As transformers' processor makes them, which knows one frame rate for all videos, where the model has one for
        each.
        """
        parts: dict[str, Any] = {"audio": _in_places(text, given) or None, "images": list(given.images) or None}
        with ExitStack() as patches:
            patches.enter_context(_each_alone(self.processor))
            if not given.videos:
                return dict(self.processor(text=[text], return_tensors="pt", **parts))
            steps_s = [self.processor.video_processor.temporal_patch_size / video.fps for video in given.videos]
            expand = functools.partial(_with_steps, self.processor.replace_multimodal_special_tokens, steps_s)
            parts |= {"videos": [video.frames for video in given.videos]}
            patches.enter_context(patch.object(self.processor, "replace_multimodal_special_tokens", expand))
            heard = are_heard(given.videos)
            made = self.processor(text=[text], return_tensors="pt", use_audio_in_video=heard, **parts)
        return {**made, "video_second_per_grid": torch.tensor(steps_s)}


@contextmanager
def _each_alone(processor: Any) -> Iterator[None]:
    """Features of sounds as of prompts of one sound each."""
    extractor = processor.feature_extractor

    def extract(sounds: Sequence[Audio], **options: Any) -> BatchFeature:
        made = [extractor(sound, **{**options, "return_tensors": "pt"}) for sound in sounds]
        longest = max(each["input_features"].shape[-1] for each in made)
        fields = {}
        for name in ("input_features", "attention_mask"):
            fill = [torch.nn.functional.pad(each[name], (0, longest - each[name].shape[-1])) for each in made]
            fields[name] = torch.cat(fill)
        return BatchFeature(fields)

    # A processor's parts are attributes of its class's own kind.
    with patch.dict(processor.__dict__, {"feature_extractor": extract}):
        yield


@contextmanager
def each_sound_alone(thinker: Any) -> Iterator[None]:
    with patch.object(thinker, "get_audio_features", functools.partial(_heard_alone, thinker.get_audio_features)):
        yield


def _heard_alone(listen: Callable[..., Any], features: torch.Tensor, mask: torch.Tensor, *_: Any, **__: Any) -> Any:
    made = [listen(features[i : i + 1], feature_attention_mask=mask[i : i + 1]) for i in range(len(mask))]
    return SimpleNamespace(last_hidden_state=torch.cat([each.last_hidden_state for each in made]))


def are_heard(seen: Sequence[Video]) -> bool:
    return any(video.audio is not None for video in seen)


def _in_places(text: str, given: Media) -> list[Audio]:
    """All sound, that of the videos too, in the order of its places in the prompt."""
    own, of_videos = iter(given.audios), iter(given.videos)
    marks = re.findall(r"<\|(?:audio|video)_pad\|>", text)
    in_order = [next(own) if mark == "<|audio_pad|>" else next(of_videos).audio for mark in marks]
    return [audio for audio in in_order if audio is not None]


def _with_steps(expand: Callable[..., Any], steps_s: Sequence[float], *args: Any, **kwargs: Any) -> Any:
    return expand(*args, **{**kwargs, "video_second_per_grid": iter(steps_s)})


def _margin(logits: torch.Tensor) -> float:
    first, second = logits.float().topk(2).values.tolist()
    return float(first - second)
