"""The vocabulary of the made checkpoints: where ids lie, the tokenizer that makes them, and the chat template."""

# transformers takes seconds to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from omni_cluster.models.checkpoint_vocabulary import trained_pairs

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

NAMED_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
"""In the hub's order, in which their ids follow those of the byte pairs."""
_OF_PROCESSOR = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
BASE = 400
"""Ids of byte pairs, before those of the named tokens."""
VOCAB_SIZE = 448

_TEXT = "system\nuser\nassistant\n" * 9 + "You are a helpful assistant. Hello world, what is in the picture? " * 4
"""What pairs are learned from. The names of roles come often enough to be one token each, as the hub's are."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content or 'input_audio' in content %}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif content['type'] == 'video' or 'video' in content or 'video_url' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def id_of(token: str) -> int:
    """Of a named token, or of a piece of text that is one token."""
    return BASE + NAMED_TOKENS.index(token) if token in NAMED_TOKENS else _pairs()[0][token]


@cache
def _pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    return trained_pairs(BASE, _TEXT)


def build_tokenizer(vocab_size: int) -> Qwen2Tokenizer:
    """A byte-level BPE whose ids lie as `id_of` says; the others of `vocab_size` are words that no text is made of."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    pairs, merges = _pairs()
    # Already in the vocabulary, so that each keeps its own id whatever the order in which the tokenizer adds them.
    vocab = {**pairs, **{token: id_of(token) for token in NAMED_TOKENS}}
    if vocab_size > VOCAB_SIZE:  # random weights sample all of them, and a client should see when
        vocab |= {f"Ġw{index}": index for index in range(len(vocab), vocab_size)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=_OF_PROCESSOR, model_max_length=4096,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=t.startswith("<|"), normalized=False) for t in NAMED_TOKENS])
    return tokenizer
