"""Vocabularies of byte-level BPE for checkpoints of random weights."""

# tokenizers takes a while to import and a reader of a cached checkpoint needs none of it, so the functions import it.
from __future__ import annotations

import json


def trained_pairs(size: int, text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of `size` ids: the bytes, and pairs of a short text, so that merging is exercised."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {str(piece): int(index) for piece, index in model["vocab"].items()}
    vocab.update({f"ĠĠunused{index}": index for index in range(len(vocab), size)})
    return vocab, [(str(left), str(right)) for left, right in model["merges"]]
