"""The synchronous pipeline: arguments, progress bar, beginning and end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from omni_cluster.config.schema import PipelineConfig
from omni_cluster.engine.omni_llm import OmniLLM, OmniPrompt
from omni_cluster.types.errors import ConfigError, RequestError
from omni_cluster.types.inputs import Media
from omni_cluster.vllm_engine.engine_processes import ENGINE_PROCESSES
from omni_cluster.vllm_engine.stage_llm import StageLLM
from tests.codes import codes_of
from tests.engine.stages import Speak, code2wav_stage, pipeline_config, talker_stage, thinker_stage
from tests.processes import running_after
from tests.reference import KINDS, media, prompt_text


def prompt(kind: str) -> OmniPrompt:
    audios, images = media(kind)
    return OmniPrompt(prompt_text(kind), Media(tuple(audios), tuple(images)))


GONE_S = 30
"""One that was killed takes a moment to go."""


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.full
def test_all_kinds_at_once_are_the_references_in_the_order_of_the_prompts(omni: OmniLLM, speak: Speak) -> None:
    outputs = omni.generate([prompt(kind) for kind in KINDS], voice="Ethan", use_tqdm=False)
    for output, kind in zip(outputs, KINDS, strict=True):
        wanted = speak(kind, "Ethan")
        assert list(output.token_ids) == wanted.token_ids
        assert codes_of(output) == wanted.codes
        assert output.audio is not None
        np.testing.assert_allclose(output.audio.samples, wanted.waveform, atol=1e-4, rtol=0)


@pytest.mark.full
def test_voice_and_seed_may_be_one_for_each_prompt(omni: OmniLLM, speak: Speak) -> None:
    outputs = omni.generate([prompt_text("text")] * 2, voice=["Ethan", "Chelsie"], seed=[1, 0], use_tqdm=False)
    for output, wanted in zip(outputs, (speak("text", "Ethan", 1), speak("text", "Chelsie", 0)), strict=True):
        assert output.audio is not None
        np.testing.assert_allclose(output.audio.samples, wanted.waveform, atol=1e-4, rtol=0)


def test_one_prompt_need_not_be_a_list(omni: OmniLLM, speak: Speak) -> None:
    (output,) = omni.generate(prompt_text("text"), modalities=["text"], use_tqdm=False)
    assert list(output.token_ids) == speak("text").token_ids and output.audio is None


def test_no_prompts_no_answers(omni: OmniLLM) -> None:
    assert omni.generate([], use_tqdm=False) == []


def test_sampling_is_given_stage_by_stage(omni: OmniLLM, speak: Speak) -> None:
    (output,) = omni.generate(prompt_text("text"), [{}, {"max_tokens": 9}, {}], use_tqdm=False)
    assert list(output.token_ids) == speak("text").token_ids
    assert codes_of(output) == speak("text").codes[:9]


def test_conversation_is_rendered_and_voices_are_known(omni: OmniLLM) -> None:
    assert omni.render([{"role": "user", "content": "Hello world, describe it."}]).text == prompt_text("text")
    assert set(omni.voices) == {"Chelsie", "Ethan"}


def test_progress_bar_counts_the_requests(omni: OmniLLM, capfd: pytest.CaptureFixture[str]) -> None:
    omni.generate([prompt_text("text")] * 3, modalities=["text"])
    assert "3/3" in capfd.readouterr().err


def test_progress_bar_can_be_left_out(omni: OmniLLM, capfd: pytest.CaptureFixture[str]) -> None:
    omni.generate([prompt_text("text")] * 3, modalities=["text"], use_tqdm=False)
    captured = capfd.readouterr()
    assert "/3" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"modalities": ["audio"]}, r"modalities is \['audio'\]; use 'text', alone or with 'audio' and 'image'"),
        ({"modalities": ["text", "video"]}, r"modalities is \['text', 'video'\]"),
        ({"modalities": []}, r"modalities is \[\]"),
        ({"voice": "Nobody"}, "voice is 'Nobody'; use one of Chelsie, Ethan"),
        ({"voice": ["Chelsie", "Nobody"]}, "voice is 'Nobody'"),
        ({"voice": ["Chelsie", "Ethan", "Chelsie"]}, "voice has 3 values for 2 prompts"),
        ({"voice": []}, "voice has 0 values for 2 prompts"),
        ({"seed": [1, 2, 3]}, "seed has 3 values for 2 prompts"),
        ({"sampling_params_list": [{}]}, "sampling_params_list has 1 entries; give one a stage: thinker, talker"),
        ({"sampling_params_list": []}, "sampling_params_list has 0 entries"),
        ({"sampling_params_list": [{}] * 4}, "sampling_params_list has 4 entries"),
        ({"sampling_params_list": [{"top_q": 1}, {}, {}]}, "'top_q' of stage thinker"),
        ({"sampling_params_list": [{}, {"temperature": -1}, {}]}, "temperature of stage talker is -1"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(omni: OmniLLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        omni.generate([prompt_text("text")] * 2, use_tqdm=False, **arguments)


def test_prompt_that_is_too_long_is_refused(omni: OmniLLM) -> None:
    with pytest.raises(RequestError, match="length is 1536 tokens, but the prompt has 4001 tokens"):
        omni.generate([prompt_text("text"), "hello " * 2000], use_tqdm=False)


@pytest.mark.full
def test_shutdown_ends_processes_and_threads_and_may_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE_PROCESSES, "_context", None)  # its engine is spawned, as a program's that embeds it
    before = children()
    text_only = PipelineConfig(model="preset:tiny", family="qwen2_5_omni", stages=[thinker_stage()])
    with OmniLLM(text_only) as omni:
        assert children() > before
        assert len(omni.generate("Hello", modalities=["text"], use_tqdm=False)) == 1
        threads_before = threads().count("omni-llm")
        omni.shutdown()
        assert threads().count("omni-llm") == threads_before - 1
        omni.shutdown()
    assert running_after(list(children() - before), GONE_S) == []
    omni.shutdown()


@pytest.mark.full
def test_engine_that_cannot_start_takes_the_others_down_with_it() -> None:
    processes, names = children(), sorted(threads())
    too_long = talker_stage(max_model_len=4096, kv_cache_memory_bytes=1 << 20)
    config = PipelineConfig(
        model="preset:tiny", family="qwen2_5_omni", stages=[code2wav_stage(), too_long, thinker_stage()]
    )
    with pytest.raises(Exception, match="Engine core initialization failed"):
        OmniLLM(config)
    assert children() <= processes
    assert not [name for name in threads() if name not in names and name.startswith(("omni-llm", "code2wav"))]


def test_bad_configuration_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], StageLLM.start

    async def recorded(stage: StageLLM) -> None:
        started.append(stage)
        await start(stage)

    monkeypatch.setattr(StageLLM, "start", recorded)
    names = threads().count("omni-llm")
    with pytest.raises(ConfigError, match=r"engine_args\.max_num_seq"):
        OmniLLM(pipeline_config(talker=talker_stage(max_num_seq=8)))
    assert started == [] and threads().count("omni-llm") == names


def test_configuration_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    names = threads().count("omni-llm")
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        OmniLLM(tmp_path / "absent.yaml")
    assert threads().count("omni-llm") == names
