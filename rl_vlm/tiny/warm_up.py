"""A short supervised training that teaches a tiny model the form of its turns, and nothing of images."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl_vlm.data.turns import TurnFormat
    from rl_vlm.types import Completion, Forward, Prompt

Turns = Sequence["str | Image"]
"""Turns of the model, each with an image after it that it observes, except the last."""

NUM_LINES = 4
"""The log has this many lines about the steps."""
logger = logging.getLogger(__name__)


def warm_up(
    directory: Path,
    data: DataConfig,
    answers: Iterable[str | Turns],
    *,
    tools: Sequence[dict[str, Any]] = (),
    num_steps: int = 60,
    num_images: int = 64,
    learning_rate: float = 1e-3,
) -> None:
    """Train a checkpoint on prompts of `data` with given answers, and overwrite its weights.

    Each step takes the first `num_images` training rows, and as many of `answers`, which must not end. If answers are
    drawn without regard to the rows, the model learns their form and how often each occurs. An answer is a text, or
    turns with calls of `tools`, which are JSON schemas.
    """
    import torch

    from rl_vlm.data.prompts import PromptBuilder, load_processor
    from rl_vlm.data.samples import load_rows
    from rl_vlm.data.turns import TurnFormat
    from rl_vlm.model.loading import load_policy, token_rules

    config = RunConfig(model=ModelConfig(model_name_or_path=str(directory)), data=data)
    policy = load_policy(config, str(directory))
    processor = load_processor(str(directory), config.model, data)
    stops = token_rules(config.model, str(directory), processor.tokenizer).stop
    form = TurnFormat.choose(PromptBuilder(processor, data), stops, tools, "auto", "auto", takes_images=True)
    rows = load_rows(data, "train")
    prompts = [form.builder.build(rows[row]) for row in range(min(num_images, len(rows)))]
    texts = iter(answers)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=learning_rate)
    for step in range(1, num_steps + 1):
        completions = [completion_of(answer, form) for answer in islice(texts, len(prompts))]
        optimizer.zero_grad()
        batch = supervised_batch(list(zip(prompts, completions, strict=True)))
        loss = -policy(batch).logprobs_NT.sum() / len(prompts)
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


def completion_of(answer: str | Turns, form: TurnFormat) -> Completion:
    """Return the completion whose turns have the texts of an answer. Images are results of the calls before them."""
    from dataclasses import replace

    import torch

    from rl_vlm.data.images import png_bytes
    from rl_vlm.types import NO_TOKENS, ToolResult

    completion, tokenizer = NO_TOKENS, form.tokenizer
    for part in [answer] if isinstance(answer, str) else answer:
        if isinstance(part, str):
            ids = tokenizer.encode(part)
            if not any(tuple(ids[-len(stop) :]) == stop for stop in form.stop_sequences):
                ids.append(tokenizer.eos_token_id)
            completion = completion.continued(torch.tensor(ids), torch.zeros(len(ids)), "stop", part)
        else:
            turn = completion.last_turn.tolist()
            result = ToolResult([{"type": "image"}], (png_bytes(part),))
            seen = form.observe("warm-up", turn, form.parse(turn).calls, [result], [[part]])
            completion = replace(completion, pending=seen)
    return completion


def supervised_batch(examples: list[tuple[Prompt, Completion]]) -> Forward:
    """Build the forward of prompts with one given completion each."""
    import torch

    from rl_vlm.types import Forward, Group, MicroBatch, ScoredGroup, SubGroup

    one = torch.zeros(1)
    groups = [Group("", prompt, [completion], policy_version=0) for prompt, completion in examples]
    scored = [ScoredGroup(group, one[:, None], one, one, valid_G=one == 0, has_variance=True) for group in groups]
    return Forward(MicroBatch([SubGroup(group, [0]) for group in scored], shared=False))
