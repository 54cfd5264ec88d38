"""Reward given by a reward model: a sequence classifier of transformers with one logit."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rewards.contract import Score
from rewards.forms import prompt_in
from rewards.text import TextOrMessages, completion_text

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""A name on the hub: `name` or `owner/name`."""


class RewardModel(NamedTuple):
    """A loaded model with its tokenizer."""

    model: Any
    tokenizer: Any


def reward_model(
    completions: Sequence[TextOrMessages],
    prompts: Sequence[Any],
    *,
    model: str = "",
    device: Literal["cpu", "cuda", "auto"] = "auto",
    batch_size: int = 8,
    max_length: int = 4096,
    sigmoid: bool = False,
) -> list[Score]:
    """Return the logit that a reward model gives to each conversation, or its sigmoid.

    The model reads text only: images are left out. Raises ValueError if a setting is missing or invalid, or if the
    model is not a reward model.
    """
    check_name(model)
    if batch_size < 1 or max_length < 1:
        raise ValueError(f"batch_size={batch_size} and max_length={max_length} must be 1 or more")
    if device not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device={device!r} is none of cpu, cuda and auto")
    if not completions:
        return []
    loaded = load(model, device)
    token_ids = [
        tokenize(loaded.tokenizer, conversation(prompt, completion), max_length)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    size = batch_size if pad_token_id(loaded.model) is not None else 1
    parts = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    return [score for part in parts for score in forward(loaded.model, part, sigmoid)]


def check_name(name: str) -> None:
    """Raise ValueError unless a model's name is a folder with a config, or a possible name on the hub."""
    if not name:
        raise ValueError("reward_model needs `model` in its kwargs: the name or the folder of a reward model")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"reward_model: the folder {name} holds no model (config.json)")
    if not Path(name).is_dir() and not HUB_NAME.fullmatch(name):
        raise ValueError(f"reward_model: `model` is {name!r}, which is neither a folder nor a name on the hub")


@functools.cache
def load(name: str, device: str) -> RewardModel:
    """Load a reward model and its tokenizer once. Raises ValueError if the checkpoint is not a reward model."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.chat_template:
        raise ValueError(f"reward_model: the tokenizer of {name} has no chat template")
    model, report = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"]))
        raise ValueError(f"reward_model: {name} is no reward model: its checkpoint has no {missing}")
    if model.config.num_labels != 1:
        raise ValueError(f"reward_model: {name} has {model.config.num_labels} logits; a reward model has one")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RewardModel(model.eval().to(device), tokenizer)


def conversation(prompt: Any, completion: TextOrMessages) -> list[dict[str, str]]:
    """Convert a prompt and its completion to text messages. The completion continues a final assistant message."""
    messages = [
        {"role": message["role"], "content": completion_text([message])} for message in prompt_in("messages", prompt)
    ]
    text = completion_text(completion)
    if messages and messages[-1]["role"] == "assistant":
        text = messages.pop()["content"] + text
    return [*messages, {"role": "assistant", "content": text}]


def tokenize(tokenizer: Any, messages: list[dict[str, str]], max_length: int) -> list[int]:
    """Return the last `max_length` tokens of a conversation, since a model reads its logit at the end.

    Lone surrogates become question marks, since no tokenizer accepts them.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False).encode("utf-8", "replace").decode()
    return tokenizer(text, add_special_tokens=False)["input_ids"][-max_length:]


def pad_token_id(model: Any) -> int | None:
    """Return the model's padding token, or None if it has none."""
    return model.config.get_text_config().pad_token_id


def forward(model: Any, token_ids: Sequence[list[int]], sigmoid: bool) -> list[float]:
    """Pad a batch on the right, and return its logits or their sigmoids."""
    import torch

    longest = max(map(len, token_ids))
    padded = [ids + [pad_token_id(model) or 0] * (longest - len(ids)) for ids in token_ids]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids]
    with torch.inference_mode():
        inputs = {"input_ids": padded, "attention_mask": mask}
        logits = model(**{name: torch.tensor(rows, device=model.device) for name, rows in inputs.items()}).logits
        logits = logits[:, 0].float()
        return (logits.sigmoid() if sigmoid else logits).tolist()
