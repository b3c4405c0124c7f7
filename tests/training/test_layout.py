"""The fast way of laying conversations out gives what the server gives the thinker, and transformers' processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration

from omni_cluster.models.chat_files import FileTokenizer
from omni_cluster.models.family import Hearing
from omni_cluster.models.prompts import PromptMaker
from omni_cluster.models.qwen2_5_omni.family import Qwen2_5Omni
from omni_cluster.models.qwen2_5_omni.hearing import RECOGNITION
from training.checkpoint import toy_config
from training.layout import Conversation, Layout, Seen, Sound, Turn
from training.prompts import SPEAKING, TRANSCRIBE
from training.recordings import tokens_of

SOUNDS = {"short": 12_345, "long": 70_000}
PICTURES = {"wide": (224, 56), "square": (112, 112)}


def sound(name):
    return Sound(tokens_of(SOUNDS[name]), name)


def seen(name):
    width, height = PICTURES[name]
    return Seen(height // 28, width // 28, name)


CONVERSATIONS = {
    "text": Conversation((Turn(("what is three plus four",), "three plus four is seven"),)),
    "sound": Conversation((Turn((sound("long"),), "three plus four is seven"),), SPEAKING),
    "picture": Conversation((Turn((seen("wide"), "what is this"), "i see a red star"),), "Be brief."),
    "both": Conversation((Turn((seen("square"), sound("short")), "i see a red star"),)),
    "empty system": Conversation((Turn(("Hello, how are you?",), "hello"),), ""),
    "turns": Conversation(
        (
            Turn((sound("short"),), "a b c"),
            Turn((seen("square"), "what is this"), "i see a", is_learnt=False),
            Turn(("and this ", seen("wide"), " here",), "i see a blue ring"),
            Turn(("say hello", sound("long")), "hello"),
        ),
        SPEAKING,
    ),
    "transcript": Conversation((Turn((TRANSCRIBE[0], sound("short")), "three plus four"),), RECOGNITION),
}  # fmt: skip


@pytest.fixture(scope="module")
def layout(toy_folder):
    return Layout(PromptMaker(FileTokenizer(toy_folder)))


def prompt_of(layout, conversation):
    """Ids and positions, without the last answer."""
    laid = layout.lay(conversation)
    begin = laid.learnt[laid.last_from]
    return laid.ids[:begin], laid.positions[:, :begin]


def messages_of(conversation):
    """As a client sends it, without the last answer."""
    messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        messages.append({"role": "user", "content": [content_of(part) for part in turn.parts]})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages[:-1]


def content_of(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "audio"} if isinstance(part, Sound) else {"type": "image"}


def sources(conversation, kind):
    return [part.source for turn in conversation.turns for part in turn.parts if isinstance(part, kind)]


def noise(samples):
    return np.random.RandomState(0).randn(samples).astype(np.float32) * 0.1


def processed(folder, text, conversation):
    sounds = [noise(SOUNDS[name]) for name in sources(conversation, Sound)]
    pictures = [Image.new("RGB", PICTURES[name]) for name in sources(conversation, Seen)]
    processor = Qwen2_5OmniProcessor.from_pretrained(folder)
    return processor(text=[text], audio=sounds or None, images=pictures or None, return_tensors="pt")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_and_positions_are_the_server_s_and_transformers(toy_folder, layout, name):
    conversation = CONVERSATIONS[name]
    family = Qwen2_5Omni.__new__(Qwen2_5Omni)  # the toy has no voices yet, and none are needed to render
    family.folder = toy_folder
    prompt = family.render(messages_of(conversation))
    inputs = processed(toy_folder, prompt.text, conversation)
    laid_ids, laid_positions = prompt_of(layout, conversation)
    assert laid_ids == inputs["input_ids"][0].tolist()
    thinker = Qwen2_5OmniThinkerForConditionalGeneration(toy_config().thinker_config)
    frames = inputs["feature_attention_mask"].sum(1) if "feature_attention_mask" in inputs else None
    positions, _ = thinker.get_rope_index(
        inputs["input_ids"], inputs.get("image_grid_thw"), None, inputs["attention_mask"], False, frames
    )
    assert torch.equal(positions[:, 0].long(), torch.from_numpy(laid_positions.copy()))


def test_a_transcript_is_asked_for_in_the_server_s_words(toy_folder, layout):
    family = Qwen2_5Omni.__new__(Qwen2_5Omni)
    family.folder = toy_folder
    for question, hearing in zip(TRANSCRIBE, (Hearing(), Hearing("English")), strict=True):
        conversation = Conversation((Turn((question, sound("short")), "hello"),), RECOGNITION)
        prompt = family.hearing(hearing)
        ids = processed(toy_folder, prompt.text, conversation)["input_ids"][0].tolist()
        assert prompt_of(layout, conversation)[0] == ids


def test_answers_and_their_ends_are_learnt_but_those_that_were_cut_off(toy_folder, layout):
    laid = layout.lay(CONVERSATIONS["turns"])
    prompts = PromptMaker(FileTokenizer(toy_folder))
    learnt = prompts.text([laid.ids[place] for place in laid.learnt])
    assert learnt == "a b c<|im_end|>i see a blue ring<|im_end|>hello<|im_end|>"
    assert prompts.text([laid.ids[place] for place in laid.learnt[laid.last_from :]]) == "hello<|im_end|>"
