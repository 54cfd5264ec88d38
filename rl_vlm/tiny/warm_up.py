"""A short supervised training that teaches a tiny model the form of an answer, and nothing of images."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from rl_vlm.types import Forward, Prompt

NUM_LINES = 4
"""The log has this many lines about the steps."""
logger = logging.getLogger(__name__)


def warm_up(
    directory: Path,
    data: DataConfig,
    answers: Iterable[str],
    *,
    num_steps: int = 60,
    num_images: int = 64,
    learning_rate: float = 1e-3,
) -> None:
    """Train a checkpoint on prompts of `data` with given answers, and overwrite its weights.

    Each step takes the first `num_images` training rows, and as many of `answers`, which must not end. If answers are
    drawn without regard to the rows, the model learns their form and how often each occurs.
    """
    import torch

    from rl_vlm.data.prompts import PromptBuilder, load_processor
    from rl_vlm.data.samples import load_rows
    from rl_vlm.model.loading import load_policy

    config = RunConfig(model=ModelConfig(model_name_or_path=str(directory)), data=data)
    policy = load_policy(config, str(directory))
    processor = load_processor(str(directory), config.model, data)
    builder, rows, tokenizer = PromptBuilder(processor, data), load_rows(data, "train"), processor.tokenizer
    prompts = [builder.build(rows[row]) for row in range(min(num_images, len(rows)))]
    texts = iter(answers)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=learning_rate)
    for step in range(1, num_steps + 1):
        ids = [tokenizer.encode(text + tokenizer.eos_token) for text in islice(texts, len(prompts))]
        optimizer.zero_grad()
        loss = -policy(supervised_batch(list(zip(prompts, ids, strict=True)))).logprobs_NT.sum() / len(prompts)
        loss.backward()
        optimizer.step()
        if step % max(1, num_steps // NUM_LINES) == 0:
            logger.info("warm-up: step %d of %d, loss %.2f per answer", step, num_steps, loss.item())
    policy.transformer.save_pretrained(directory)


def random_answers(answers: Sequence[str], seed: int) -> Iterator[str]:
    """Yield one of the answers at random, for ever."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield answers[int(torch.randint(len(answers), (), generator=generator))]


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
