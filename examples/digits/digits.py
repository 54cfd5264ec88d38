"""Handwritten digits: scikit-learn's 1,797 real scans of 8 x 8 pixels, and a model that cannot read them yet.

`configs/digits.yaml` names these functions. A short supervised warm-up on random labels teaches the starting model the
answer format, so that its accuracy is at chance level and all further skill comes from the rewards.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.cached import cached_model

if TYPE_CHECKING:
    from rl_vlm.types import Forward, Prompt

QUESTION = "Which digit is this?"
WARM_UP_STEPS = 60
WARM_UP_IMAGES = 64


@cache
def _scans() -> list[dict[str, Any]]:
    """Return all scans as dataset rows, each with a unique id."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return [
        {
            "id": f"digit-{i:04d}",
            "prompt": QUESTION,
            "image": Image.fromarray((scan * (255 / 16)).astype("uint8")),
            "solution": str(label),
        }
        for i, (scan, label) in enumerate(zip(digits.images, digits.target, strict=True))
    ]


def _split() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split the rows into three quarters to train on and a stratified quarter held out, the same in every run."""
    from sklearn.model_selection import train_test_split

    labels = [row["solution"] for row in _scans()]
    parts: Any = train_test_split(_scans(), test_size=0.25, stratify=labels, random_state=0)
    return parts[0], parts[1]


def train_rows() -> list[dict[str, Any]]:
    """Return the rows to train on."""
    return _split()[0]


def held_out_rows() -> list[dict[str, Any]]:
    """Return the rows that are never trained on."""
    return _split()[1]


@cached_model()
def starting_model(directory: Path, seed: int) -> None:
    """Write a Qwen2.5-VL of half a million parameters that answers `<answer>d</answer>` with a random digit."""
    from rl_vlm.tiny.build import build_tiny

    build_tiny("qwen2_5_vl", directory, whole_tokens=("<answer>", "</answer>"), initializer_range=0.1, seed=seed)
    teach_format(directory, seed)


def teach_format(directory: Path, seed: int) -> None:
    """Train on images with random labels, and overwrite the checkpoint's weights."""
    import torch

    from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig
    from rl_vlm.data.prompts import PromptBuilder, load_processor
    from rl_vlm.data.samples import load_rows
    from rl_vlm.model.loading import load_policy

    data = DataConfig(dataset_name=f"{__name__}:train_rows", min_pixels=256)
    config = RunConfig(model=ModelConfig(model_name_or_path=str(directory)), data=data)
    policy = load_policy(config, str(directory))
    processor = load_processor(str(directory), config.model, config.data)
    builder, rows = PromptBuilder(processor, config.data), load_rows(config.data, "train")
    tokenizer = processor.tokenizer
    answers = [tokenizer.encode(f"<answer>{digit}</answer>{tokenizer.eos_token}") for digit in range(10)]

    images = [builder.build(rows[row]) for row in range(WARM_UP_IMAGES)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(WARM_UP_STEPS):
        labels = torch.randint(10, (WARM_UP_IMAGES,), generator=generator).tolist()
        examples = [(image, answers[label]) for image, label in zip(images, labels, strict=True)]
        optimizer.zero_grad()
        (-policy(supervised_batch(examples)).logprobs_NT.sum() / len(examples)).backward()
        optimizer.step()
    policy.transformer.save_pretrained(directory)


def supervised_batch(examples: list[tuple[Prompt, list[int]]]) -> Forward:
    """Build the forward of prompts with one given completion each."""
    import torch

    from rl_vlm.types import Completion, Forward, Group, MicroBatch, ScoredGroup, SubGroup

    one = torch.zeros(1)
    groups = [
        Group("", prompt, [Completion(torch.tensor(ids), torch.zeros(len(ids)), "stop", "")], policy_version=0)
        for prompt, ids in examples
    ]
    scored = [ScoredGroup(group, one[:, None], one, one, valid_G=one == 0, has_variance=True) for group in groups]
    return Forward(MicroBatch([SubGroup(group, [0]) for group in scored], shared=False))
