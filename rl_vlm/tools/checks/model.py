"""Check the model of a run: its files, the lengths of prompts, and whether its weights fit on this machine.

The model is never downloaded. If a function writes it, the function writes to a temporary directory.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows, fitting_rows
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor, smallest_max_pixels
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import OTHER_PROBLEM, DataError, Finding, Severity
from rl_vlm.model.files import read_json
from rl_vlm.model.loading import base_of, initial_checkpoint, longest_prompt
from rl_vlm.model.policy import Policy
from rl_vlm.passes.budget import TokenBudget
from rl_vlm.passes.large_prompts import LargePrompts
from rl_vlm.plan.auto import start_budget
from rl_vlm.plan.weights import TRAINED_BYTES, Weights
from rl_vlm.run.build import NUM_LARGEST, NUM_PLANNED
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.dry_run import cached_snapshot
from rl_vlm.tools.checks.machine import gib, old_transformers
from rl_vlm.tools.checks.rows import Split
from rl_vlm.types import Progress

LONG = "Shorten the prompt or raise data.max_prompt_length: the run leaves the row out."
BUDGET = "Raise memory.micro_batch_tokens, or set a lower data.max_pixels."


def find_checkpoint(config: RunConfig, is_model_wanted: bool, diagnosis: Diagnosis) -> str | None:
    """Return the checkpoint that the run starts from, or None if it is not on this machine.

    `config` has a temporary `output_dir`. If a function writes the model, it writes there.
    """
    name = config.model.model_name_or_path
    if names_function(name):
        if not is_model_wanted:
            diagnosis.not_checked.append(f"prompts and model: {name} writes the model, and --no-model is set")
            return None
        return initial_checkpoint(config, Ranks())
    if not Path(name).is_dir() and cached_snapshot(name, config.model.model_revision) is None:
        diagnosis.not_checked.append(f"prompts and model: {name} is not on this machine; download it first")
        return None
    return name


def check_family(checkpoint: str, revision: str, diagnosis: Diagnosis) -> None:
    """Note a finding if the installed transformers is too old for the model's family."""
    base = base_of(checkpoint)
    directory = Path(base) if Path(base).is_dir() else cached_snapshot(base, revision)
    if directory is not None:
        model_type = str(read_json(directory / "config.json").get("model_type"))
        diagnosis.findings += old_transformers(model_type, version("transformers"))


def make_builder(config: RunConfig, checkpoint: str) -> PromptBuilder:
    """Build the prompt builder of the run."""
    processor = load_processor(checkpoint, config.model, config.data)
    return PromptBuilder(processor, config.data, longest_prompt(config, checkpoint))


def fitting(split: Split, builder: PromptBuilder, limit: int | None, diagnosis: Diagnosis) -> UsableRows:
    """Return the rows whose prompts can be built and fit. Note a finding for each other row.

    Build the same prompts as the run does before its first step: with `max_prompt_length`, all of them.
    """
    rows = split.rows
    listed = replace(split.usable, rows=replace(rows, config=rows.config.model_copy(update={"on_bad_row": "drop"})))
    try:
        kept = fitting_rows(listed, builder, limit)
    except DataError as error:  # no row is left
        diagnosis.findings.append(Finding("error", "no prompt fits", str(error), LONG))
        return split.usable
    for record in kept.dropped:
        is_long = "tokens" in record
        kind = "prompt with too many tokens" if is_long else "prompt that cannot be built"
        place = f"{record['data']}, row {record['row']}"
        what = record["reason"] if record["reason"].startswith(place) else f"{place}: {record['reason']}"
        severity: Severity = "warning" if is_long else "error"
        diagnosis.findings.append(
            Finding(severity, kind, what, LONG if is_long else OTHER_PROBLEM.remedy, record["data"], record["row"])
        )
    diagnosis.checked.append(f"prompts of {rows.name} against {limit_text(limit, builder.max_tokens)}")
    return kept


def limit_text(limit: int | None, longest: int | None) -> str:
    """Describe the limits on the length of a prompt."""
    context = f"the model's {longest} tokens" if longest else "no limit of the model"
    return context if limit is None else f"{context} and data.max_prompt_length {limit}"


def too_large(weights: Weights) -> str | None:
    """Return why the model does not fit on this machine, or None if it fits.

    The weights are loaded in float32. A training step adds a gradient and two moments for each trained weight.
    """
    needed = TRAINED_BYTES * (weights.num + 3 * weights.num_trained)
    free = free_memory()
    if needed <= free:
        return None
    return f"it needs {gib(needed)}, and this machine has {gib(free)} free"


def free_memory() -> int:
    """Return the free bytes of the GPU, or of the host if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_budget(
    config: RunConfig, checkpoint: str, policy: Policy, builder: PromptBuilder, usable: UsableRows, diagnosis: Diagnosis
) -> None:
    """Note a finding for each prompt that exceeds the token budget.

    Like the run at its start, check only the rows with the largest images and the longest texts.
    """
    prompts = {}
    for row in usable.largest(NUM_LARGEST):
        with suppress(DataError):  # found by `fitting`, or when its images are decoded
            prompts[row] = build_prompt(usable.rows, row, builder)
    ranks, setting = Ranks(), config.memory.micro_batch_tokens
    planned, _ = start_budget(config, checkpoint, ranks, list(prompts.values())[:NUM_PLANNED])
    budget = TokenBudget(ranks, Progress(max_steps=0), policy.vision, planned, setting)
    large_prompts = LargePrompts(budget, smallest_max_pixels(builder.processor))
    severity: Severity = "warning" if setting == "auto" else "error"
    for row, prompt in prompts.items():
        if large_prompts.exceeds(prompt):
            what = f"{usable.rows.place(row)}: {large_prompts.describe(prompt)}"
            diagnosis.findings.append(
                Finding(severity, "prompt beyond the token budget", what, BUDGET, usable.rows.name, row)
            )
    diagnosis.checked.append(f"{len(prompts)} largest prompts against memory.micro_batch_tokens {budget.tokens}")
