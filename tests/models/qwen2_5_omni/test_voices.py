from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from omni_cluster.models.qwen2_5_omni.voices import (
    VOICE_FILE,
    Voice,
    aliases_of,
    load_voices,
    voice_names,
)
from omni_cluster.models.voice_names import choose_names
from omni_cluster.types.errors import ConfigError


@pytest.fixture(scope="module")
def voices(tiny: Path) -> dict[str, Voice]:
    return load_voices(tiny)


def test_voices_are_what_the_file_holds(tiny: Path, voices: dict[str, Voice]) -> None:
    entries = torch.load(tiny / VOICE_FILE, weights_only=True)
    assert voices.keys() == entries.keys()
    for name, voice in voices.items():
        assert (voice.name, voice.bos_token) == (name, int(entries[name]["bos_token"]))
        assert torch.equal(voice.conditioning, entries[name]["cond"].float())
        assert torch.equal(voice.reference_mel, entries[name]["ref_mel"].float())


def test_voices_have_the_shapes_that_code2wav_takes(voices: dict[str, Voice]) -> None:
    for voice in voices.values():
        assert voice.conditioning.shape == (1, 192) and voice.reference_mel.shape[::2] == (1, 80)
        assert voice.conditioning.dtype == voice.reference_mel.dtype == torch.float32


def test_voices_that_are_stored_in_half_precision_are_widened(tmp_path: Path) -> None:
    entry = {"bos_token": 5, "cond": torch.ones(1, 192).half(), "ref_mel": torch.ones(1, 3, 80).bfloat16()}
    torch.save({"Solo": entry}, tmp_path / VOICE_FILE)
    (voice,) = load_voices(tmp_path).values()
    assert voice.conditioning.dtype == voice.reference_mel.dtype == torch.float32


def test_checkpoint_without_voices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"has no {VOICE_FILE}; use a checkpoint with voices"):
        load_voices(tmp_path)


def test_voice_file_that_is_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"Solo": Trap()}, tmp_path / VOICE_FILE)
    with pytest.raises(Exception, match="Weights only load failed"):
        load_voices(tmp_path)
    voice_names(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("form", [True, False], ids=["today's form", "torch's old form"])
def test_names_are_read_without_the_rest(tmp_path: Path, form: bool) -> None:
    entry = {"bos_token": 5, "cond": torch.ones(1, 192), "ref_mel": torch.ones(1, 3, 80).half()}
    voices = OrderedDict({"Solo": entry, "Zweite": entry})
    torch.save(voices, tmp_path / VOICE_FILE, _use_new_zipfile_serialization=form)
    assert voice_names(tmp_path) == ("Solo", "Zweite") == tuple(load_voices(tmp_path))


@pytest.mark.parametrize(
    ("allowed", "default", "chosen"),
    [
        (None, None, ["Chelsie", "Ethan"]),
        (None, "Ethan", ["Ethan", "Chelsie"]),
        (["Ethan"], None, ["Ethan"]),
        (["Chelsie", "Ethan"], "Ethan", ["Ethan", "Chelsie"]),
        (["Ethan", "Chelsie"], None, ["Ethan", "Chelsie"]),
    ],
)
def test_default_voice_comes_first(
    voices: dict[str, Voice], allowed: list[str] | None, default: str | None, chosen: list[str]
) -> None:
    assert choose_names(tuple(voices), allowed, default) == tuple(chosen)


@pytest.mark.parametrize(("allowed", "default"), [(["Chelsie", "Nobody"], None), (None, "Nobody")])
def test_voice_that_the_checkpoint_lacks_is_refused(
    voices: dict[str, Voice], allowed: list[str] | None, default: str | None
) -> None:
    with pytest.raises(ConfigError, match="voice 'Nobody' is not in the checkpoint; use voices among Chelsie, Ethan"):
        choose_names(tuple(voices), allowed, default)


def test_openai_s_voices_are_aliases_of_those_on_offer() -> None:
    openai = (
        "alloy",
        "ash",
        "ballad",
        "coral",
        "echo",
        "fable",
        "nova",
        "onyx",
        "sage",
        "shimmer",
        "verse",
        "marin",
        "cedar",
    )
    both = aliases_of(("Ethan", "Chelsie"))
    assert set(openai) <= both.keys() and {both[name] for name in openai} == {"Chelsie", "Ethan"}
    assert (both["alloy"], both["onyx"], both["default"]) == ("Chelsie", "Ethan", "Ethan")
    assert set(aliases_of(("Chelsie",)).values()) == {"Chelsie"} and "Ethan" not in aliases_of(("Chelsie",))
    assert set(aliases_of(("Solo", "Zweite")).values()) == {"Solo"}
