"""The toy: Qwen2.5-Omni's architecture with at most ten million parameters, in the hub's layout.

Its text vocabulary is byte pairs of the small world's sentences. Its talker has at most 1,056 codes, not 8,192.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

from omni_cluster.models.chat_family import READ_ALOUD
from omni_cluster.models.checkpoint_vocabulary import trained_pairs
from omni_cluster.models.qwen2_5_omni.checkpoint import write_configs, write_processor
from omni_cluster.models.qwen2_5_omni.checkpoint_configs import config_of, mrope
from omni_cluster.models.qwen2_5_omni.checkpoint_tokens import (
    SPECIAL_TOKENS,
    TOOL_TOKENS,
    TokenLayout,
    tokenizer_of,
)
from training.pictures import SIDE
from training.prompts import SYSTEM_PROMPTS, TRANSCRIBE
from training.typed import typed
from training.words import LETTERS
from training.world import Split, items, vocabulary

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig, Qwen2Tokenizer

TOKENS: Final = TokenLayout(1040, SPECIAL_TOKENS + TOOL_TOKENS, 1066, 1067, 1068, chelsie=1072, ethan=1073)
TEXT_VOCABULARY: Final = 1088
"""A multiple of 64, as vLLM pads it, and no more than the codes': transformers warns of ids that the talker lacks."""
CODEC_MARKS: Final = 1056
"""The first id behind the codes that is a mark."""
CODEC_VOCABULARY: Final = 1088
PICTURE_PIXELS: Final = {"shortest_edge": (SIDE - 1) ** 2, "longest_edge": (SIDE + 1) ** 2}
"""Square pictures of all sizes are read at the one that is trained on, for the tower is blind to others. The bounds
leave room for rounding."""
FRAME_PIXELS: Final = {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}
TOKENIZER_ITEMS: Final = 20_000


def toy_config() -> Qwen2_5OmniConfig:
    # Its module imports transformers, which takes seconds.
    from training.code2wav_parts import TOKEN2WAV

    return config_of(
        {"thinker": _thinker(), "talker": _talker(), "token2wav": TOKEN2WAV}, TOKENS, CODEC_MARKS, "float32"
    )


def _thinker() -> dict[str, Any]:
    hidden = 256
    return {
        "user_token_id": 1,
        # Heads of 64, which vLLM attends with on a CPU.
        "text_config": {
            "vocab_size": TEXT_VOCABULARY, "hidden_size": hidden, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": mrope(8, 12, 12), "tie_word_embeddings": False,
        },
        "audio_config": {
            "num_mel_bins": 128, "encoder_layers": 4, "encoder_attention_heads": 3, "encoder_ffn_dim": 512,
            "d_model": 192, "max_source_positions": 1500, "n_window": 100, "output_dim": hidden,
        },
        # Pictures are small: each layer attends to all of one.
        "vision_config": {
            "depth": 2, "hidden_size": 96, "intermediate_size": 128, "num_heads": 3, "patch_size": 14,
            "window_size": 112, "out_hidden_size": hidden, "fullatt_block_indexes": [0, 1], "tokens_per_second": 25,
        },
    }  # fmt: skip


def _talker() -> dict[str, Any]:
    return {
        "vocab_size": CODEC_VOCABULARY, "embedding_size": 256, "hidden_size": 256, "head_dim": 64,
        "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "rope_parameters": mrope(8, 12, 12),
    }  # fmt: skip


def write_toy(folder: Path) -> None:
    """All of the toy but its weights and voices."""
    folder.mkdir(parents=True, exist_ok=True)
    write_processor(build_tokenizer(), PICTURE_PIXELS, FRAME_PIXELS, folder)
    write_configs(toy_config(), TOKENS, folder)


def build_tokenizer() -> Qwen2Tokenizer:
    """The same on every host: its pairs are those of items that are drawn by a seed."""
    return tokenizer_of(TOKENS, *trained_pairs(TOKENS.base, "\n".join(_sentences())))


def _sentences() -> Iterator[str]:
    """As they are asked and answered; words that are rare in these, often enough to be one token."""
    rng = Random(0)
    for item in islice(items(Split.TRAIN, seed=0), TOKENIZER_ITEMS):
        yield from (item.question, typed(item.question, rng), item.answer)
    for word in vocabulary():
        yield from (f" {word}",) * 100
    yield from (f" {letter}" for letter in LETTERS for _ in range(1000))
    yield from (*SYSTEM_PROMPTS, *TRANSCRIBE, READ_ALOUD, "system\n", "user\n", "assistant\n") * 50
