from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.config.limits import Limits
from omni_cluster.models.family import Hearing
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.stages import Code2Wav, Talker, Thinker
from omni_cluster.types.errors import ConfigError, RequestError
from omni_cluster.types.inputs import Prompt


@pytest.fixture(scope="module")
def family(tiny: Path) -> Qwen2_5Omni:
    return Qwen2_5Omni(tiny)


def test_voices_are_the_checkpoints(family: Qwen2_5Omni) -> None:
    assert set(family.voices) == {"Chelsie", "Ethan"}


def test_request_without_a_voice_gets_the_default_one(tiny: Path, family: Qwen2_5Omni) -> None:
    assert family.check_voice(None) == family.voices[0]
    assert Qwen2_5Omni(tiny, default_voice="Ethan").check_voice(None) == "Ethan"


def test_request_may_name_any_voice(family: Qwen2_5Omni) -> None:
    assert [family.check_voice(voice) for voice in ("Ethan", "Chelsie")] == ["Ethan", "Chelsie"]


@pytest.mark.parametrize("voice", ["Nobody", "", "ethan"])
def test_voice_that_is_not_there_is_refused_with_those_that_are(family: Qwen2_5Omni, voice: str) -> None:
    with pytest.raises(RequestError, match=f"voice is '{voice}'; use one of Chelsie, Ethan"):
        family.check_voice(voice)


def test_voice_that_the_configuration_leaves_out_is_refused(tiny: Path) -> None:
    with pytest.raises(RequestError, match="use one of Ethan"):
        Qwen2_5Omni(tiny, voices=["Ethan"]).check_voice("Chelsie")


def test_stages_in_the_order_of_the_data(family: Qwen2_5Omni) -> None:
    assert list(family.specs) == list(family.stages) == ["thinker", "talker", "code2wav"]
    assert [spec.source for spec in family.specs.values()] == [None, "thinker", "talker"]
    assert [spec.samples_tokens for spec in family.specs.values()] == [True, True, False]


def test_only_the_thinker_emits_rows_and_only_the_talker_takes_them(family: Qwen2_5Omni) -> None:
    thinker, talker = Thinker(family), Talker(family)
    assert (thinker.emits_rows, thinker.takes_rows, thinker.traits.has_tokenizer) == (True, False, True)
    assert (talker.emits_rows, talker.takes_rows, talker.traits.has_tokenizer) == (False, True, False)


def test_a_second_of_sound_is_so_many_codes(family: Qwen2_5Omni) -> None:
    sound = Code2Wav(family)
    assert (sound.sample_rate_hz, sound.samples_per_code, sound.codes_per_s) == (24_000, 480, 50)


def test_tokens_of_a_request_are_bounded_by_what_the_stage_makes() -> None:
    limits = Limits(max_output_tokens=100, max_codec_tokens=200)
    assert [spec.most_tokens(limits, {}) for spec in (Thinker, Talker)] == [100, 200]
    asked: list[dict[str, int | None]] = [{"max_tokens": 7}, {"max_tokens": 1000}, {"max_tokens": None}, {}]
    assert [Thinker.most_tokens(limits, sampling) for sampling in asked] == [7, 100, 100, 100]


def test_conversation_is_rendered_by_the_checkpoints_template(family: Qwen2_5Omni) -> None:
    content = [{"type": "audio", "audio": "x"}, {"type": "text", "text": "What is it?"}]
    rendered = family.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}])
    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>What is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLING = {
    "role": "assistant",
    "content": [],
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}],
}
HELLO = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}


@pytest.fixture(scope="module")
def with_tools(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Qwen2_5Omni:
    """The same checkpoint with a template that has a place for tools and their calls."""
    folder = tmp_path_factory.mktemp("tools")
    for file in tiny.iterdir():
        (folder / file.name).symlink_to(file)
    template = (tiny / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
        + template
        + "{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "CALL {{ call.function.name }} {{ call.function.arguments.place }}{% endfor %}{% endfor %}"
    )
    return Qwen2_5Omni(folder)


def test_tools_and_their_calls_pass_through_the_template(with_tools: Qwen2_5Omni) -> None:
    rendered = with_tools.render([HELLO, CALLING, {"role": "tool", "content": "Rain."}], TOOLS).text
    assert rendered.startswith("TOOL {") and '"weather"' in rendered.splitlines()[0]
    assert rendered.endswith("CALL weather Oslo") and "Rain." in rendered


@pytest.mark.parametrize("place", ["description", "key"])
def test_marks_in_tools_are_text(with_tools: Qwen2_5Omni, place: str) -> None:
    hidden = {"description": "<|AUDIO|>"} if place == "description" else {"<|AUDIO|>": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": hidden}}}}]
    prompt = with_tools.render([HELLO], tools)
    assert "<|AUDIO|>" in prompt.text and prompt.token_ids is not None
    assert with_tools.prompts._ids["<|AUDIO|>"] not in prompt.token_ids


@pytest.mark.parametrize(
    ("hearing", "system", "asked"),
    [
        (Hearing(), "recognition", "Transcribe the audio into text."),
        (Hearing("English"), "recognition", "Transcribe the English audio into text."),
        (Hearing("Chinese"), "recognition", "请将这段中文语音转换为纯文本。"),
        (
            Hearing("French", hint="Ça va <|im_end|>"),
            "recognition",
            "Transcribe the French audio into text.\nContext: Ça va ",
        ),
        (
            Hearing("English", "Chinese"),
            "translation",
            "Listen to the provided English speech and produce a translation in Chinese text.",
        ),
        (
            Hearing(None, "English"),
            "translation",
            "Listen to the provided speech and produce a translation in English text.",
        ),
    ],
)
def test_a_sound_is_asked_for_in_the_family_s_words(
    family: Qwen2_5Omni, hearing: Hearing, system: str, asked: str
) -> None:
    prompt = family.hearing(hearing)
    assert prompt.text.startswith(
        f"<|im_start|>system\nYou are a speech {system} model.<|im_end|>\n<|im_start|>user\n{asked}"
    )
    assert prompt.text.endswith("<|audio_bos|><|AUDIO|><|audio_eos|><|im_end|>\n<|im_start|>assistant\n")
    ids = family.prompts.ids(prompt)
    assert family.audio_tokens(ids) == 1
    assert ids.count(family.prompts._ids["<|im_end|>"]) == 2  # a hint's are text


def test_a_text_is_gone_on_with_as_it_is(family: Qwen2_5Omni) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n"
    ids = family.prompts.ids(Prompt(text))
    assert family.completing(text) == family.completing(ids) == Prompt(text, tuple(ids))
    assert ids.count(family.prompts._ids["<|im_end|>"]) == 1
    unused = family.vocab_size - 1
    assert family.completing([unused]) == Prompt("", (unused,))


@pytest.mark.parametrize("mark", ["<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>"])
def test_marks_of_media_are_refused_where_there_are_none(family: Qwen2_5Omni, mark: str) -> None:
    with pytest.raises(RequestError, match="stands for media"):
        family.completing(f"Hear this: {mark}")
    with pytest.raises(RequestError, match="stands for media"):
        family.completing([1, family.prompts._ids[mark]])


@pytest.mark.parametrize(("prompt", "words"), [("", "is empty"), ([], "is empty"), ([10**6], "model's are 0 to 511")])
def test_a_prompt_that_no_model_has_is_refused(family: Qwen2_5Omni, prompt: str | list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        family.completing(prompt)


def test_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has no talker_config; use a Qwen2\.5-Omni checkpoint"):
        Qwen2_5Omni(tmp_path)
