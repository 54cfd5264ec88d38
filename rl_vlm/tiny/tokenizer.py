"""A small byte-level tokenizer with a family's own special tokens, trained on a given corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

DEFAULT_CORPUS = (
    "system user assistant What is in this picture? Which digit is this? Describe the image. Compare the two images.",
    "The answer is <answer>7</answer> <answer>12</answer> because it has one loop and a long tail, yes or no.",
)


CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The first tokens of every tiny tokenizer: padding, and the start and end marks of ChatML. The end mark is EOS."""


def train_tokenizer(corpus: Iterable[str], special_tokens: Sequence[str], vocab_size: int = 400, **options: Any) -> Any:
    """Train a byte-level BPE tokenizer on `corpus`.

    The first ids are `CHAT_TOKENS` and `special_tokens`; the 256 bytes follow. `options` are passed to the tokenizer's
    class, for instance `model_specific_special_tokens={"image_token": "<image>"}`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    special = [*CHAT_TOKENS, *special_tokens]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    merges: Any = [tuple(merge) for merge in json.loads(bpe.to_str())["model"]["merges"]]
    return Qwen2Tokenizer(
        vocab=bpe.get_vocab(), merges=merges, eos_token=CHAT_TOKENS[2], pad_token=CHAT_TOKENS[0],
        additional_special_tokens=special[1:], **options,
    )  # fmt: skip
