"""Qwen2.5-Omni: thinker, talker, code2wav."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omni_cluster.models.chat_family import ChatFamily
from omni_cluster.models.checkpoint_files import read_config
from omni_cluster.models.family import Hearing
from omni_cluster.models.qwen2_5_omni.code2wav import CodeBlocks
from omni_cluster.models.qwen2_5_omni.hearing import messages_of
from omni_cluster.models.qwen2_5_omni.special_ids import MediaIds, SpecialIds
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav, Talker, Thinker
from omni_cluster.models.qwen2_5_omni.video_frames import FRAMES
from omni_cluster.models.qwen2_5_omni.voices import (
    Voice,
    aliases_of,
    load_voices,
    voice_names,
)
from omni_cluster.models.stage_spec import StageSpec, by_name
from omni_cluster.models.voice_names import choose_names
from omni_cluster.types.errors import ConfigError
from omni_cluster.types.inputs import Prompt

if TYPE_CHECKING:  # the ingress, which renders prompts and knows voices by name, starts without torch
    from omni_cluster.models.qwen2_5_omni.talker import TextEmbeddings


class Qwen2_5Omni(ChatFamily):
    """One checkpoint of the family, 7B, 3B or a toy: they differ in sizes only."""

    name = "qwen2_5_omni"
    stages: ClassVar[Mapping[str, type[StageSpec]]] = by_name(Thinker, Talker, Code2Wav)
    presets = ("tiny", "toy")
    frames = FRAMES
    system = "You are a helpful assistant."

    def __init__(self, model: Path, default_voice: str | None = None, voices: Sequence[str] | None = None) -> None:
        self.folder = model
        self._config = config = read_config(model)
        if "talker_config" not in config:
            raise ConfigError(f"model {model} has no talker_config; use a Qwen2.5-Omni checkpoint.")
        self.ids = SpecialIds.from_config(config)
        self._media_ids = MediaIds.from_config(config)
        self._voice_names = choose_names(voice_names(model), voices, default_voice)

    @classmethod
    def embedded_checkpoint(cls, preset: str) -> Path:
        from omni_cluster.models.qwen2_5_omni.checkpoint import embedded_checkpoint

        return embedded_checkpoint(preset)

    @classmethod
    def make_checkpoint(
        cls, preset: str, out: Path, *, device: str | None = None, progress: Callable[[str], None] = print
    ) -> object:
        from omni_cluster.models.qwen2_5_omni.checkpoint import make_checkpoint

        return make_checkpoint(preset, out, device=device, progress=progress)

    @property
    def voices(self) -> tuple[str, ...]:
        return self._voice_names

    @property
    def voice_aliases(self) -> Mapping[str, str]:
        return aliases_of(self._voice_names)

    @property
    def media_ids(self) -> tuple[int, ...]:
        return tuple(self._media_ids)

    def hearing(self, hearing: Hearing) -> Prompt:
        return self.render(messages_of(hearing))

    @property
    def vocab_size(self) -> int:
        return int(self._config["thinker_config"]["text_config"]["vocab_size"])

    @property
    def codec_vocab_size(self) -> int:
        """Codes and marks of the talker."""
        return int(self._config["talker_config"]["vocab_size"])

    @cached_property
    def text_embeddings(self) -> TextEmbeddings:
        from omni_cluster.models.qwen2_5_omni.talker import TextEmbeddings

        return TextEmbeddings.load(self.folder, self.ids, self.loaded_voices)

    @cached_property
    def blocks(self) -> CodeBlocks:
        return CodeBlocks.from_config(self._config)

    @cached_property
    def loaded_voices(self) -> dict[str, Voice]:
        loaded = load_voices(self.folder)
        return {name: loaded[name] for name in self._voice_names}
