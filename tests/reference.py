"""transformers' own Qwen2.5-Omni, greedy and in float32: what every parity test compares with."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import LogitsProcessor, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from omni_cluster.types.inputs import Video

KINDS = ("text", "audio", "image", "audio+image")
VIDEO_KINDS = (
    "video",
    "video+slow",
    "image+video+audio",
    "heard",
    "audio+heard+image",
    "heard-slow+audio+heard+heard-short",
)
"""Of "video", at 2 frames a second, and "slow"; "heard": with its audio."""
SAMPLE_RATE = 16000

Audio = NDArray[np.float32]
Media = tuple[list[Audio], list[Image.Image]]

_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"
_MARKS = {
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    **dict.fromkeys(("video", "slow", "heard", "heard-slow", "heard-short"), _VIDEO),
}


@dataclass(frozen=True)
class ThinkerReference:
    """P prompt ids, K generated ids, and per computed position the row that the talker gets.

    rows: float32 [P + K - 1, H], last hidden + token embedding, the embedding zero at audio, image and video positions.
    positions: int64 [3, P]. min_margin: the least gap between the two largest logits of a step.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    rows: torch.Tensor
    positions: torch.Tensor
    min_margin: float


@dataclass(frozen=True)
class SpeechReference:
    """A spoken reply.

    codes: what token2wav was given, without the stop id. waveform: float32 [480 * codes], 24 kHz.
    talker_positions: int64 [3, P + 2], of the talker's prefill.
    min_margin: as in `ThinkerReference`, of the talker's logits after the repetition penalty.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    codes: list[int]
    waveform: NDArray[np.float32]
    talker_positions: torch.Tensor
    min_margin: float


def prompt_text(kind: str, question: str = "Hello world, describe it.") -> str:
    marks = "".join(_MARKS[part] for part in _parts(kind))
    return f"{_SYSTEM}<|im_start|>user\n{marks}{question}<|im_end|>\n<|im_start|>assistant\n"


def media(kind: str) -> Media:
    parts = _parts(kind)
    return [synthetic_audio()] if "audio" in parts else [], [synthetic_image()] if "image" in parts else []


def videos(kind: str) -> list[Video]:
    """In the order of their places; none for the kinds of `KINDS`."""
    made = {
        "video": lambda: synthetic_video(4, fps=2.0),
        "slow": lambda: synthetic_video(4, fps=0.4, seed=1),
        "heard": lambda: synthetic_video(4, fps=1.0, audio_s=5.0, seed=2),
        # Frames that are several chunks apart, and frames that outlast their sound and the text behind it.
        "heard-slow": lambda: synthetic_video(4, fps=0.2, audio_s=4.5, seed=3),
        "heard-short": lambda: synthetic_video(4, fps=1.05, audio_s=0.3, seed=4),
    }
    return [made[part]() for part in _parts(kind) if part in made]


def synthetic_video(frames: int, fps: float, audio_s: float | None = None, seed: int = 0) -> Video:
    """A bright square that goes to the right through noise, 84 x 56."""
    pixels = np.random.RandomState(seed).randint(0, 128, (frames, 56, 84, 3)).astype(np.uint8)
    for t in range(frames):
        pixels[t, 10:30, 5 + 12 * t : 25 + 12 * t] = 255 - 40 * seed
    return Video(pixels, fps, None if audio_s is None else synthetic_audio(audio_s))


def synthetic_audio(duration_s: float = 2.5) -> Audio:
    """A rising tone in noise, float32 at 16 kHz."""
    time_s = np.arange(int(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    noise = np.random.RandomState(0).randn(time_s.size)
    return (0.3 * np.sin(2 * np.pi * (200 + 900 * time_s) * time_s) + 0.05 * noise).astype(np.float32)


def synthetic_image(width: int = 140, height: int = 112) -> Image.Image:
    """A red ramp across, a green ramp down, blue noise."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = np.linspace(0, 255, width)[None]
    pixels[:, :, 1] = np.linspace(0, 255, height)[:, None]
    pixels[:, :, 2] = np.random.RandomState(1).randint(0, 255, (height, width))
    return Image.fromarray(pixels)


def _parts(kind: str) -> list[str]:
    return [] if kind == "text" else kind.split("+")


@dataclass
class _Observed:
    """What the talker and token2wav were given and answered while `generate` ran."""

    margins: list[float] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    talker_positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _MarginRecorder(LogitsProcessor):
    def __init__(self, margins: list[float]) -> None:
        self.margins = margins

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.margins.append(_margin(scores[0]))
        return scores


class Reference:
    """The whole model, loaded once from a checkpoint folder.

    transformers' `generate` drops an all-ones attention mask; the talker then skips its codec embeddings and 3D
    positions, and makes other codes than for the same prompt in a padded batch. `restore_mask` gives the mask back.
    """

    def __init__(self, checkpoint: Path, *, restore_mask: bool = True) -> None:
        self.processor = Qwen2_5OmniProcessor.from_pretrained(checkpoint)
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        if restore_mask:
            talker = self.model.talker
            talker.prepare_inputs_for_generation = _with_mask(talker.prepare_inputs_for_generation)

    @torch.inference_mode()
    def thinker(
        self,
        text: str,
        audios: Sequence[Audio] = (),
        images: Sequence[Image.Image] = (),
        max_new_tokens: int = 24,
        videos: Sequence[Video] = (),
    ) -> ThinkerReference:
        """Greedy text; ends after the eos id, which is then the last of `token_ids`, or after `max_new_tokens`."""
        inputs = self._inputs(text, audios, images, videos)
        prompt_ids = inputs["input_ids"][0].tolist()
        made = self.model.thinker.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, use_audio_in_video=_are_heard(videos),
            return_dict_in_generate=True, output_logits=True, output_hidden_states=True,
        )  # fmt: skip
        return ThinkerReference(
            prompt_ids=prompt_ids,
            token_ids=made.sequences[0, len(prompt_ids) :].tolist(),
            rows=self._rows(made),
            positions=self._positions(inputs, _are_heard(videos)),
            min_margin=min(_margin(logits[0]) for logits in made.logits),
        )

    @torch.inference_mode()
    def speech(
        self,
        text: str,
        audios: Sequence[Audio] = (),
        images: Sequence[Image.Image] = (),
        *,
        voice: str = "Chelsie",
        max_new_tokens: int = 16,
        max_codes: int = 60,
        seed: int = 0,
        videos: Sequence[Video] = (),
    ) -> SpeechReference:
        """Greedy text and codes (repetition penalty 1.05), and the waveform from noise of `seed`, through `generate`.

        The noise is `torch.randn([1, 2 * len(codes), 80], generator=torch.Generator().manual_seed(seed))`.
        `max_new_tokens` is at least 2: transformers needs one generated token that was fed back.
        """
        inputs = self._inputs(text, audios, images, videos)
        for pixels in inputs.keys() & {"pixel_values", "pixel_values_videos"}:
            # Passed to all parts otherwise, and the talker's generate refuses it.
            inputs[f"thinker_{pixels}"] = inputs.pop(pixels)
        prompt_ids = inputs["input_ids"][0].tolist()
        with self._observed(seed) as observed:
            sequences, waveform = self.model.generate(
                **inputs, speaker=voice, generation_mode="audio", use_audio_in_video=_are_heard(videos),
                thinker_max_new_tokens=max_new_tokens, thinker_do_sample=False,
                talker_max_new_tokens=max_codes, talker_do_sample=False, talker_repetition_penalty=1.05,
                talker_logits_processor=[_MarginRecorder(observed.margins)],
            )  # fmt: skip
        return SpeechReference(
            prompt_ids=prompt_ids,
            token_ids=sequences[0, len(prompt_ids) :].tolist(),
            codes=observed.codes,
            waveform=waveform.numpy(),
            talker_positions=observed.talker_positions[:, 0].long(),
            min_margin=min(observed.margins),
        )

    @torch.inference_mode()
    def waveform(
        self, codes: Sequence[int], voice: str = "Chelsie", seed: int = 0, num_steps: int = 10
    ) -> NDArray[np.float32]:
        """float32 [480 * len(codes)] at 24 kHz, from the noise of `seed` as in `speech`."""
        voices = self.model.speaker_map[voice]
        torch.manual_seed(seed)
        waveform = self.model.token2wav(
            torch.tensor([list(codes)]),
            conditioning=voices["cond"].float(),
            reference_mel=voices["ref_mel"].float(),
            num_steps=num_steps,
        )
        array: NDArray[np.float32] = waveform.reshape(-1).float().numpy()
        return array

    def _inputs(
        self,
        text: str,
        audios: Sequence[Audio] = (),
        images: Sequence[Image.Image] = (),
        videos: Sequence[Video] = (),
    ) -> dict[str, Any]:
        media: dict[str, Any] = {"audio": _in_places(text, audios, videos) or None, "images": list(images) or None}
        if not videos:
            return dict(self.processor(text=[text], return_tensors="pt", **media))
        # The processor knows one frame rate for all videos, the model one for each.
        steps_s = [self.processor.video_processor.temporal_patch_size / video.fps for video in videos]
        expand = functools.partial(_with_steps, self.processor.replace_multimodal_special_tokens, steps_s)
        media |= {"videos": [video.frames for video in videos], "use_audio_in_video": _are_heard(videos)}
        with patch.object(self.processor, "replace_multimodal_special_tokens", expand):
            inputs = self.processor(text=[text], return_tensors="pt", **media)
        return {**inputs, "video_second_per_grid": torch.tensor(steps_s)}

    def _rows(self, made: Any) -> torch.Tensor:
        ids = made.sequences[0, :-1]
        config = self.model.config.thinker_config
        media_ids = torch.tensor([config.audio_token_index, config.image_token_index, config.video_token_index])
        last_hidden = torch.cat([states[-1] for states in made.hidden_states], dim=1)[0]
        embeds = self.model.thinker.get_input_embeddings()(ids)
        return last_hidden + embeds.masked_fill(torch.isin(ids, media_ids)[:, None], 0)

    def _positions(self, inputs: dict[str, Any], use_audio_in_video: bool) -> torch.Tensor:
        audio_mask = inputs.get("feature_attention_mask")
        positions, _ = self.model.thinker.get_rope_index(
            inputs["input_ids"], inputs.get("image_grid_thw"), inputs.get("video_grid_thw"), inputs["attention_mask"],
            use_audio_in_video, None if audio_mask is None else audio_mask.sum(1), inputs.get("video_second_per_grid"),
        )  # fmt: skip
        return positions[:, 0].long()

    @contextmanager
    def _observed(self, seed: int) -> Iterator[_Observed]:
        observed = _Observed()

        def before_talker(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if observed.talker_positions.numel() == 0:
                observed.talker_positions = _given_or_linear(kwargs)

        def before_token2wav(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observed.codes.extend(args[0][0].tolist())
            torch.manual_seed(seed)

        hooks = [
            self.model.talker.model.register_forward_pre_hook(before_talker, with_kwargs=True),
            self.model.token2wav.register_forward_pre_hook(before_token2wav, with_kwargs=True),
        ]
        try:
            yield observed
        finally:
            for hook in hooks:
                hook.remove()


def _are_heard(videos: Sequence[Video]) -> bool:
    return any(video.audio is not None for video in videos)


def _in_places(text: str, audios: Sequence[Audio], videos: Sequence[Video]) -> list[Audio]:
    """All sound, that of the videos too, in the order of its places in the prompt."""
    own, of_videos = iter(audios), iter(videos)
    marks = re.findall(r"<\|(?:AUDIO|VIDEO)\|>", text)
    in_order = [next(own) if mark == "<|AUDIO|>" else next(of_videos).audio for mark in marks]
    return [audio for audio in in_order if audio is not None]


def _with_steps(expand: Callable[..., Any], steps_s: Sequence[float], *args: Any, **kwargs: Any) -> Any:
    return expand(*args, **{**kwargs, "video_second_per_grid": iter(steps_s)})


def _margin(logits: torch.Tensor) -> float:
    first, second = logits.float().topk(2).values.tolist()
    return float(first - second)


def _given_or_linear(kwargs: dict[str, Any]) -> torch.Tensor:
    """Positions [3, 1, length] of a talker prefill, which counts along the prompt if it is given none."""
    if kwargs["position_ids"] is not None:
        positions: torch.Tensor = kwargs["position_ids"]
        return positions
    return torch.arange(kwargs["inputs_embeds"].shape[1]).expand(3, 1, -1)


def _with_mask(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    # `wraps` keeps the signature, by which generate decides which keyword arguments the model knows.
    @functools.wraps(prepare)
    def prepare_with_mask(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(*args, **kwargs)
        if inputs.get("attention_mask") is None:
            embeds, past = inputs.get("inputs_embeds"), inputs.get("past_key_values")
            new = embeds.shape[1] if embeds is not None else inputs["input_ids"].shape[1]
            length = new + (past.get_seq_length() if past is not None else 0)
            inputs["attention_mask"] = torch.ones(1, length, dtype=torch.long)
        return inputs

    return prepare_with_mask
