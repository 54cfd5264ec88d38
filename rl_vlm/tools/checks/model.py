"""Check the model of a run: the lengths of prompts, its size on this machine, the token budget and pixels.

The model is never downloaded. If a function writes it, the function writes to a temporary directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from rl_vlm.config.function_names import names_function
from rl_vlm.config.precision import with_precision
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows, unfitting_rows, with_frames
from rl_vlm.data.problems import LONG_PROMPT
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import DataError, Finding, Severity
from rl_vlm.model.files import local_directory, read_json
from rl_vlm.model.flex_kernels import with_fitting_attention
from rl_vlm.model.in_memory import free_host_memory
from rl_vlm.model.loading import base_of, initial_checkpoint, load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.passes.budget import TokenBudget
from rl_vlm.passes.large_prompts import LargePrompts
from rl_vlm.plan.auto import start_budget
from rl_vlm.plan.host import loaded
from rl_vlm.plan.weights import TRAINED_BYTES, Weights, count_weights
from rl_vlm.rollout.build import builder_for
from rl_vlm.rollout.environments.build import choose_turns
from rl_vlm.run.build import NUM_LARGEST, NUM_PLANNED
from rl_vlm.tools.checks.diagnosis import DATA, Checking, Note, attempt
from rl_vlm.tools.checks.environments import toolbox
from rl_vlm.tools.checks.files import model_files
from rl_vlm.tools.checks.machine import check_disk, gib, old_transformers
from rl_vlm.tools.checks.pixels import check_pixels
from rl_vlm.tools.checks.rows import Split, about_row, every_row
from rl_vlm.tools.checks.settings import high_learning_rate
from rl_vlm.tools.checks.table import CheckCost, Subject
from rl_vlm.tools.checks.videos import video_notes
from rl_vlm.types import Progress

BUDGET = "Raise memory.micro_batch_tokens, or set a lower data.max_pixels, data.video_max_pixels or data.max_frames."


class Prompts(NamedTuple):
    """The rows whose prompts fit, and the checkpoint and the builder of these prompts."""

    checkpoint: str
    builder: PromptBuilder
    train: UsableRows
    held_out: UsableRows | None


def prompts(subject: Subject) -> Checking[Prompts | None]:
    """Check the prompts with the files of the model. Return None if they cannot be checked."""
    config, splits = subject.config, subject.value(every_row)
    if splits is None or splits.train is None or not splits.train.usable.indices:
        yield Note("prompts and model: no training row can be used", is_checked=False)
        return None
    if reason := why_not_opened(subject):
        yield Note(f"prompts and model: {reason}", is_checked=False)
        return None
    checkpoint = initial_checkpoint(subject.elsewhere, Ranks())
    yield from check_family(checkpoint, config.model.model_revision)
    most_videos = max(split.usable.most_videos for split in splits.loaded)
    processor, fitted = load_processor(checkpoint, config.model, config.data), []
    builder = builder_for(processor, subject.elsewhere, checkpoint, most_videos)
    if config.rollout.has_tools:
        box = subject.value(toolbox)
        if box is None:
            yield Note("prompts and model: the tools have errors", is_checked=False)
            return None
        turns = choose_turns(config, base_of(checkpoint), builder, box)
        for description in dict.fromkeys(each.description for each in turns.formats.values()):
            yield Note(description)
        builder = turns.builder
    for split in splits.loaded:
        fitted.append((yield from fitting(split, builder, config.data.max_prompt_length)))
        yield from attempt(video_notes(fitted[-1], builder), DATA)
    train, held_out = [*fitted, None][:2]
    return Prompts(checkpoint, builder, train, held_out)


def why_not_opened(subject: Subject) -> str | None:
    """Return why the files of the model cannot be opened, or None. A directory is opened in spite of errors."""
    name, missing = subject.config.model.model_name_or_path, subject.value(model_files)
    if missing is None and not Path(name).is_dir():
        return f"{name} has errors"
    if missing:
        return f"{missing} is not on this machine; download it first"
    is_unwritten = names_function(name) and subject.cost < CheckCost.MODEL
    return f"{name} writes the model, and --no-model is set" if is_unwritten else None


def size(subject: Subject) -> Checking[bool]:
    """Check the learning rate and the disk space for the size of the model. Return whether it can be loaded."""
    found, splits = subject.value(prompts), subject.value(every_row)
    if found is None or splits is None:
        return False
    weights = count_weights(local_config(subject), found.checkpoint)
    yield from high_learning_rate(subject.config, weights.num)
    yield from check_disk(subject.config, weights, splits.num_steps)
    reason = too_large(weights) if subject.cost == CheckCost.MODEL else "--no-model is set"
    if reason is not None:
        yield Note(f"pixels, token budget and two steps: {reason}", is_checked=False)
    return reason is None


def local_config(subject: Subject) -> RunConfig:
    """Return the config with the temporary directory, and with the precision and attention that this machine takes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return with_fitting_attention(with_precision(subject.elsewhere, device.type), device)


def loaded_model(subject: Subject) -> Checking[None]:
    """Load the model, and check the token budget and the effect of pixels."""
    found = subject.value(prompts)
    if found is not None and subject.value(size):
        config = local_config(subject)
        policy = load_policy(config, found.checkpoint).to(Ranks().device)
        yield from check_budget(config, found.checkpoint, policy, found.builder, found.train)
        yield from check_pixels(policy, found.builder, found.train)


def check_family(checkpoint: str, revision: str) -> Iterator[Finding]:
    """Yield a finding if the installed transformers is too old for the model's family."""
    directory = local_directory(base_of(checkpoint), revision)
    if directory is not None:
        model_type = str(read_json(directory / "config.json").get("model_type"))
        yield from old_transformers(model_type, version("transformers"))


def fitting(split: Split, builder: PromptBuilder, limit: int | None) -> Checking[UsableRows]:
    """Return the rows whose prompts can be built and fit. Yield a finding for each other row.

    Build the same prompts as the run does before its first step: with `max_prompt_length`, all of them.
    """
    usable = with_frames(split.usable, builder)
    dropped = list(unfitting_rows(usable, builder, limit))
    yield from (each.finding for each in dropped)
    try:
        kept = usable.without(dropped)
    except DataError as error:  # no row is left
        yield Finding("error", "no prompt fits", str(error), LONG_PROMPT.remedy)
        return split.usable
    yield Note(f"prompts of {usable.rows.name} against {limit_text(limit, builder.max_tokens)}")
    return kept


def limit_text(limit: int | None, longest: int | None) -> str:
    """Describe the limits on the length of a prompt."""
    context = f"the model's {longest} tokens" if longest else "no limit of the model"
    return context if limit is None else f"{context} and data.max_prompt_length {limit}"


def too_large(weights: Weights) -> str | None:
    """Return why the model does not fit on this machine, or None if it fits.

    A training step adds a gradient and two moments for each trained weight.
    """
    needed = loaded(weights) + 3 * TRAINED_BYTES * weights.num_trained
    free = free_bytes()
    if needed <= free:
        return None
    return f"the model is too large for this machine: it needs {gib(needed)}, and this machine has {gib(free)} free"


def free_bytes() -> int:
    """Return the free bytes of the GPU, or of the host if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return free_host_memory()


def check_budget(
    config: RunConfig, checkpoint: str, policy: Policy, builder: PromptBuilder, usable: UsableRows
) -> Checking[None]:
    """Yield a finding for each prompt that exceeds the token budget.

    Like the run at its start, check only the rows with the largest images and the longest texts.
    """
    built = {}
    for row in usable.largest(NUM_LARGEST):
        with suppress(DataError):  # found by `fitting`, or when its images are decoded
            built[row] = build_prompt(usable.rows, row, builder)
    ranks, setting = Ranks(), config.memory.micro_batch_tokens
    planned, _ = start_budget(config, checkpoint, ranks, list(built.values())[:NUM_PLANNED])
    budget = TokenBudget(ranks, Progress(max_steps=0), policy.vision, planned, setting)
    large_prompts = LargePrompts(budget, builder.smallest_pixels)
    severity: Severity = "warning" if setting == "auto" else "error"
    for row, prompt in built.items():
        if large_prompts.exceeds(prompt):
            what = f": {large_prompts.describe(prompt)}"
            yield about_row(usable.rows, row, "prompt beyond the token budget", what, BUDGET, severity)
    yield Note(f"{len(built)} largest prompts against memory.micro_batch_tokens {budget.tokens}")
