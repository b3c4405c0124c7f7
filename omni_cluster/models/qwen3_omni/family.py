"""Qwen3-Omni: thinker, talker, code2wav."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omni_cluster.models.chat_family import ChatFamily
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import Hearing
from omni_cluster.models.hearing import question_of
from omni_cluster.models.qwen3_omni.code2wav_stage import Code2Wav
from omni_cluster.models.qwen3_omni.talker_stage import Talker
from omni_cluster.models.qwen3_omni.thinker_stage import Thinker
from omni_cluster.models.qwen3_omni.video_frames import FRAMES
from omni_cluster.models.qwen3_omni.voices import voice_ids
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.models.voice_names import aliases_of, choose_names
from omni_cluster.types.errors import ConfigError
from omni_cluster.types.inputs import Prompt

if TYPE_CHECKING:
    import torch

    from omni_cluster.models.checkpoint_maker import Weight

HIGH_VOICE, LOW_VOICE = "chelsie", "ethan"


class Qwen3Omni(ChatFamily):
    """One checkpoint of the family: 30B, or a toy."""

    name = "qwen3_omni"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Thinker, Talker, Code2Wav)
    presets = ("tiny",)
    frames = FRAMES

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        self.folder = model
        config = read_config(model)
        if "talker_config" not in config or "code2wav_config" not in config:
            raise ConfigError(f"model {model} has no talker_config and code2wav_config; use a Qwen3-Omni checkpoint.")
        self._thinker = config["thinker_config"]
        lower = None if default_voice is None else default_voice.lower()
        allowed = None if voices is None else [voice.lower() for voice in voices]
        self._voice_names = choose_names([*voice_ids(config)], allowed, lower)

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        from omni_cluster.models.qwen3_omni.checkpoint import embedded_checkpoint

        return embedded_checkpoint(preset)

    @classmethod
    def make_checkpoint(
        cls, preset: str, out: Path, *, device: str | None = None, progress: Callable[[str], None] = print
    ) -> object:
        from omni_cluster.models.qwen3_omni.checkpoint import make_checkpoint

        return make_checkpoint(preset, out, device=device, progress=progress)

    @classmethod
    def drawn(cls, weight: Weight, device: torch.device) -> torch.Tensor:
        from omni_cluster.models.qwen3_omni.checkpoint import drawn

        return drawn(weight, device)

    @property
    def voices(self) -> tuple[str, ...]:
        """In lower case, as the checkpoint has them."""
        return self._voice_names

    @property
    def voice_aliases(self) -> Mapping[str, str]:
        """The names as the model's authors write them are those of the voices themselves."""
        named = {voice.capitalize(): voice for voice in self._voice_names}
        return aliases_of(self._voice_names, HIGH_VOICE, LOW_VOICE) | named

    @property
    def media_ids(self) -> tuple[int, ...]:
        thinker = self._thinker
        return thinker["audio_token_id"], thinker["image_token_id"], thinker["video_token_id"]

    @property
    def vocab_size(self) -> int:
        return int(self._thinker["text_config"]["vocab_size"])

    def hearing(self, hearing: Hearing) -> Prompt:
        """Without a system message: its authors measure without one."""
        return self.render([question_of(hearing)])
