"""The vocabularies of the made checkpoints: where ids lie, the tokenizer that makes them, and the chat template."""

# transformers takes seconds to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_cluster.models.checkpoint_vocabulary import trained_pairs

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>",
)  # fmt: skip
TOOL_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

CHAT_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% set image_count = namespace(value=0) %}"
    "{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content or 'input_audio' in content %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "{% if add_audio_id %}Audio {{ audio_count.value }}: {% endif %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' or 'video' in content or 'video_url' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "system user assistant You are a helpful assistant. Describe the audio. Describe the image. "
    "Hello world, what is in the picture? Please answer in speech and text. "
)


@dataclass(frozen=True)
class TokenLayout:
    """Where ids lie in the text vocabulary: `base` byte-pair ids, then the named tokens, then ids that no text has."""

    base: int
    named: tuple[str, ...]
    tts_text_pad: int
    tts_text_start: int
    tts_text_end: int
    chelsie: int
    ethan: int

    def id_of(self, token: str) -> int:
        return self.base + self.named.index(token)

    @property
    def voices(self) -> dict[str, int]:
        return {"Chelsie": self.chelsie, "Ethan": self.ethan}


TINY_TOKENS = TokenLayout(400, SPECIAL_TOKENS + TOOL_TOKENS, 480, 481, 482, chelsie=490, ethan=491)
HUB_TOKENS = TokenLayout(151643, SPECIAL_TOKENS + TOOL_TOKENS, 151859, 151860, 151861, chelsie=151872, ethan=151870)


def token_layout(preset: str) -> TokenLayout:
    return TINY_TOKENS if preset == "tiny" else HUB_TOKENS


def build_tokenizer(preset: str) -> Qwen2Tokenizer:
    """A byte-level BPE whose ids lie as `token_layout` says; 3b and 7b make one token of each byte of text."""
    tokens = token_layout(preset)
    if preset == "tiny":
        return tokenizer_of(tokens, *trained_pairs(tokens.base, TRAINING_TEXT * 4))
    return tokenizer_of(tokens, _bytes_then_words(tokens.base), [])


def tokenizer_of(tokens: TokenLayout, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    """`vocab`: of the first `tokens.base` ids."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    # Already in the vocabulary, so that each keeps its own id whatever the order in which the tokenizer adds them.
    vocab.update({token: tokens.id_of(token) for token in tokens.named})
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, unk_token=None, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS, model_max_length=32768,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=t in SPECIAL_TOKENS, normalized=False) for t in tokens.named])
    return tokenizer


def _bytes_then_words(size: int) -> dict[str, int]:
    """The 256 bytes in the hub's order, then harmless words, which encoding never makes because nothing merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = [chr(256 + offset) for offset in range(256 - len(printable))]
    vocab = {piece: index for index, piece in enumerate([*map(chr, printable), *stand_ins])}
    vocab.update({f"Ġw{index}": index for index in range(len(vocab), size)})
    return vocab
