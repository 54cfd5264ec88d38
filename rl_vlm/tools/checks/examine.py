"""All checks of the doctor, in order."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from rl_vlm.config.batches import BatchSizes, total_optimizer_steps
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import load_policy
from rl_vlm.plan.weights import Weights, count_weights
from rl_vlm.reward.golds import gold_columns
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.duplicates import find_common_picture, find_duplicates
from rl_vlm.tools.checks.golds import check_gold_lengths, check_golds
from rl_vlm.tools.checks.machine import check_disk, check_machine
from rl_vlm.tools.checks.model import check_budget, check_family, find_checkpoint, fitting, make_builder, too_large
from rl_vlm.tools.checks.pixels import check_pixels
from rl_vlm.tools.checks.rows import Split, load_split
from rl_vlm.tools.checks.settings import check_settings, high_learning_rate
from rl_vlm.tools.checks.smoke import run_two_steps


def examine(config: RunConfig, with_model: bool = True, decode: bool = False) -> Diagnosis:
    """Check a run and return the diagnosis.

    With `with_model`, load the model and take two steps. With `decode`, compare images by their pixels. Write nothing
    to `output_dir`.
    """
    diagnosis = Diagnosis()
    suites, plan = check_settings(config, diagnosis)
    check_machine(config, diagnosis)
    try:
        train, held_out = examine_data(config, suites, decode, diagnosis)
    finally:
        for suite in suites:
            suite.close()
    if train is None or not train.usable.indices:
        diagnosis.not_checked.append("prompts and model: no training row can be used")
        return diagnosis
    num_steps = count_steps(config, plan, train, diagnosis)
    with TemporaryDirectory(prefix="rl-vlm-doctor-") as folder:
        elsewhere = config.model_copy(update={"train": config.train.model_copy(update={"output_dir": folder})})
        with diagnosis.noting("model", "Change the model, or the setting that the message names."):
            found = examine_prompts(config, elsewhere, suites, (train, held_out), with_model, num_steps, diagnosis)
            if found is not None:
                is_ready = plan is not None and len(suites) == len(config.rewards.reward_funcs)
                examine_model(elsewhere, *found, is_ready, diagnosis)
    return diagnosis


def examine_data(
    config: RunConfig, suites: Sequence[RewardSuite], decode: bool, diagnosis: Diagnosis
) -> tuple[Split | None, Split | None]:
    """Check rows, duplicates and gold answers of both splits. A split is None if it cannot be loaded."""
    train, held_out = (load_split(config, split, suites, diagnosis) for split in ("train", "eval"))
    splits = [split for split in (train, held_out) if split is not None]
    if splits:
        functions = [reward for suite in suites for reward in suite.functions]
        columns = list(dict.fromkeys(name for split in splits for name in split.rows.columns))
        golds = gold_columns(columns, functions)
        diagnosis.findings += find_duplicates(splits, golds, decode)
        diagnosis.checked.append(f"duplicates by prompt and {'pixels' if decode else 'encoded bytes'} of images")
    for split in splits:
        diagnosis.findings += find_common_picture(split)
        check_golds(split, suites, diagnosis)
    return train, held_out


def count_steps(config: RunConfig, plan: BatchSizes | None, train: Split, diagnosis: Diagnosis) -> int:
    """Return the number of optimizer steps of the run, or 1 if the settings have no solution."""
    if plan is not None:
        with diagnosis.noting():
            return total_optimizer_steps(config, plan, len(train.usable))
    return 1


def examine_prompts(
    config: RunConfig, elsewhere: RunConfig, suites: Sequence[RewardSuite], splits: tuple[Split, Split | None],
    with_model: bool, num_steps: int, diagnosis: Diagnosis,
) -> tuple[str, PromptBuilder, UsableRows, UsableRows | None] | None:  # fmt: skip
    """Check prompts, gold answers, the learning rate and disk space with the files of the model.

    `elsewhere` is the config with a temporary `output_dir`. Returns the checkpoint, the prompt builder and the rows of
    both splits, or None if the model will not be loaded.
    """
    checkpoint = find_checkpoint(elsewhere, with_model, diagnosis)
    if checkpoint is None:
        return None
    check_family(checkpoint, config.model.model_revision, diagnosis)
    builder, limit = make_builder(elsewhere, checkpoint), config.data.max_prompt_length
    train, held_out = (split and fitting(split, builder, limit, diagnosis) for split in splits)
    assert train is not None
    for split in filter(None, splits):
        check_gold_lengths(split, suites, builder.processor.tokenizer, config.rollout.max_completion_length, diagnosis)
    weights = count_weights(elsewhere, checkpoint)
    diagnosis.findings += high_learning_rate(config, weights.num)
    check_disk(config, weights, num_steps, diagnosis)
    if reason := why_not_loaded(weights, with_model):
        diagnosis.not_checked.append(f"pixels, token budget and two steps: {reason}")
        return None
    return checkpoint, builder, train, held_out


def why_not_loaded(weights: Weights, with_model: bool) -> str | None:
    """Return why the model is not loaded, or None if it is."""
    if not with_model:
        return "--no-model is set"
    reason = too_large(weights)
    return reason and f"the model is too large for this machine: {reason}"


def examine_model(
    config: RunConfig, checkpoint: str, builder: PromptBuilder, train: UsableRows, held_out: UsableRows | None,
    is_ready: bool, diagnosis: Diagnosis,
) -> None:  # fmt: skip
    """Load the model, check the token budget and the effect of pixels, and take two steps if the run is ready."""
    policy = load_policy(config, checkpoint).to(Ranks().device)
    check_budget(config, checkpoint, policy, builder, train, diagnosis)
    check_pixels(policy, builder, train, diagnosis)
    del policy
    gc.collect()
    if config.vllm.vllm_server_base_url:
        diagnosis.not_checked.append("two steps of the run: its servers, which others may use, would get new weights")
    elif is_ready:
        run_two_steps(config, checkpoint, train, held_out, diagnosis)
    else:
        diagnosis.not_checked.append("two steps of the run: the settings or reward functions have errors")
