"""Checks of a run that take seconds, since they do not load its model.

    rewards ─ data and the columns that rewards need ─ number of steps ─ output directory ─ model's files ─► Diagnosis

This module imports neither torch nor transformers nor `datasets`. Functions of the user may import them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from rl_vlm.algorithm.own_loss import load_loss
from rl_vlm.checkpoint.store import directories
from rl_vlm.config.batches import BatchSizes, endless_warmup, total_optimizer_steps
from rl_vlm.config.changes import changed_settings, refused_changes
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.engines import engines_where
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import RewardsConfig, RewardSpec, RunConfig
from rl_vlm.data.columns import refuse_unread_images
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.data.sources import NotOpened
from rl_vlm.errors import CheckpointError, ConfigError, Finding, ModelError, RLVLMError, require_bitsandbytes
from rl_vlm.evaluation.options import EvaluationOptions, check_by, checkpoint_names, kept_range
from rl_vlm.functions import load_function
from rl_vlm.log.files import refuse_earlier_run
from rl_vlm.model.files import ADAPTER_CONFIG, check_checkpoint, check_weights, refuse_unread_revision
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import KIND, REMEDY, Diagnosis

FIRST_ROWS = 64
"""Number of rows of Parquet and Arrow files that a dry run reads."""


def check_training(config: RunConfig, plan: BatchSizes | None) -> Diagnosis:
    """Check a training run. `plan` gives the number of steps; it is None if the batch sizes have no solution."""
    diagnosis = Diagnosis()
    rewards = check_rewards(config.rewards, diagnosis)
    check_loss(config, diagnosis)
    rows = check_data(config, "train", rewards, diagnosis)
    check_data(config, "eval", rewards, diagnosis)
    if plan is not None and rows is not None:
        with diagnosis.noting():
            num_steps = total_optimizer_steps(config, plan, len(rows) + rows.num_unread)
            diagnosis.checked.append(f"length: {num_steps} optimizer steps")
            if warning := endless_warmup(config.train, num_steps):
                diagnosis.findings.append(Finding("warning", KIND, warning, REMEDY))
    check_around_data(config, diagnosis)
    return diagnosis


def check_around_data(config: RunConfig, diagnosis: Diagnosis) -> None:
    """Check the output directory, the optimizer, the engine and the model of a training run."""
    with diagnosis.noting():
        check_output_dir(Path(config.train.output_dir))
        refuse_earlier_run(Path(config.train.output_dir), config.train)
        check_resumed(config)
        diagnosis.checked.append(f"output directory {config.train.output_dir}")
    check_optim(config, diagnosis)
    check_engine(config, diagnosis)
    check_model(config, diagnosis)


def check_evaluation(config: RunConfig, checkpoints: Sequence[str], options: EvaluationOptions) -> Diagnosis:
    """Check an evaluation of each checkpoint."""
    diagnosis = Diagnosis()
    rewards = check_rewards(config.rewards, diagnosis)
    rows = check_data(config, "eval", rewards, diagnosis)
    with diagnosis.noting():
        checkpoint_names(checkpoints)
    if rows is not None:
        with diagnosis.noting():
            check_by(options, rows)
    elif options.by:
        diagnosis.not_checked.append(f"--by {', '.join(options.by)}")
    is_kept = options.keep is not None or options.keep_by is not None
    if is_kept and rewards and len(rewards) == len(config.rewards.reward_funcs):
        with diagnosis.noting(), RewardSuite(config.rewards) as suite:
            kept_range(options, suite, config.rollout.num_generations_eval)
    with diagnosis.noting():
        check_output_dir(Path(config.train.output_dir))
        diagnosis.checked.append(f"output directory {config.train.output_dir}")
    if config.evaluation.endpoint_url is not None:
        diagnosis.not_checked.append(f"model {', '.join(checkpoints)}, which {config.evaluation.endpoint_url} serves")
        return diagnosis
    check_engine(config, diagnosis)
    for checkpoint in checkpoints:
        model = config.model.model_copy(update={"model_name_or_path": checkpoint})
        check_model(config.model_copy(update={"model": model}), diagnosis)
    return diagnosis


def check_serving(config: RunConfig) -> Diagnosis:
    """Check the engine and the model of `rl-vlm serve`."""
    diagnosis = Diagnosis()
    check_engine(config, diagnosis)
    check_model(config, diagnosis)
    return diagnosis


def check_rewards(config: RewardsConfig, diagnosis: Diagnosis) -> list[RewardSuite]:
    """Load every reward function. Return one suite for each function that loads."""
    suites: list[RewardSuite] = []
    for spec in config.reward_funcs:
        with diagnosis.noting():
            suites.append(RewardSuite(RewardsConfig(reward_funcs=[spec])))
    if len(suites) == len(config.reward_funcs):
        with diagnosis.noting():
            RewardSuite(config)  # refuses names that occur twice
    if suites:
        diagnosis.checked.append(f"reward functions {', '.join(name for suite in suites for name in suite.names)}")
    if any(isinstance(spec, RewardSpec) and spec.timeout for spec in config.reward_funcs):
        diagnosis.not_checked.append("reward functions with a timeout in a process of their own")
    return suites


def check_loss(config: RunConfig, diagnosis: Diagnosis) -> None:
    """Load the user's token loss, if there is one."""
    name = config.algorithm.loss_type
    if config.algorithm.has_own_loss:
        with diagnosis.noting():
            load_loss(name)
            diagnosis.checked.append(f"token loss {name}")
            diagnosis.not_checked.append("what the token loss returns")


def check_data(
    config: RunConfig, split: Literal["train", "eval"], rewards: Sequence[RewardSuite], diagnosis: Diagnosis
) -> Rows | None:
    """Open the data, read the first row of each entry, and check the columns that rewards need.

    Returns the rows, or None if they cannot be opened.
    """
    if not data_sources(config.data, split):
        return None
    try:
        rows = load_rows(config.data, split, FIRST_ROWS)
        golds = answer_columns(rows.columns, [reward for suite in rewards for reward in suite.functions])
        for part in rows.parts:
            if rows.check(part.start, rows.source[part.start]).continues:
                rows.refuse_answered(part.start, partial(gold_given, golds))
        if not rows.num_unread:
            refuse_unread_images(rows.source, config.data, rows.name, {c for suite in rewards for c in suite.columns})
    except NotOpened as reason:
        diagnosis.not_checked.append(f"{split} data: {reason}")
        return None
    except RLVLMError as error:
        diagnosis.findings.append(Finding("error", KIND, str(error), REMEDY))
        return None
    for suite in rewards:
        with diagnosis.noting():
            suite.check_columns(rows.columns)
    read = "the first was" if len(rows.parts) == 1 else "the first of each entry were"
    diagnosis.checked.append(f"{split} data {rows.name}: {len(rows) + rows.num_unread} rows, of which {read} read")
    return rows


def check_output_dir(path: Path) -> None:
    """Raise ConfigError if files cannot be written to the directory."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is not a directory" if not existing.is_dir() else "cannot be written to"
        raise ConfigError(f"train.output_dir {path}: {existing} {what}; choose another directory")


def check_resumed(config: RunConfig) -> None:
    """Raise CheckpointError if the checkpoint to resume cannot be read, or if a setting has changed that must not."""
    setting = config.train.resume_from_checkpoint
    found = directories(Path(config.train.output_dir)) if setting == "auto" else [Path(setting)] if setting else []
    if not found:
        return
    newest = found[-1]
    if not newest.is_dir():
        raise CheckpointError(f"train.resume_from_checkpoint {newest} is not a directory")
    try:
        saved = json.loads((newest / "trainer_state.json").read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"train.resume_from_checkpoint {newest} is not a checkpoint of a run: {error!r}"
        ) from error
    refused = refused_changes(changed_settings(saved, config), False, config.train.load_best_model_at_end)
    if refused:
        raise CheckpointError(f"{newest} cannot be resumed with changed settings: {'; '.join(refused)}")


def check_optim(config: RunConfig, diagnosis: Diagnosis) -> None:
    """Note a problem if the optimizer needs bitsandbytes and it is not installed."""
    if config.train.optim == "adamw_8bit":
        with diagnosis.noting():
            require_bitsandbytes("train.optim: adamw_8bit")


def check_engine(config: RunConfig, diagnosis: Diagnosis) -> None:
    """Note a problem if the engine needs a package that is not installed."""
    engine, urls = config.rollout.facts, config.vllm.vllm_server_base_url
    if urls and engine.uses_servers:
        diagnosis.not_checked.append(f"servers at {', '.join(urls)}")
    elif engine.package is not None and importlib.util.find_spec(engine.package) is None:
        others = " or ".join(engines_where(lambda other: other.package is None))
        what = (
            f"rollout.engine is {config.rollout.engine}, and {engine.title} is not installed; install it, or use "
            f"{others}"
        )
        diagnosis.findings.append(Finding("error", KIND, what, REMEDY))


def check_model(config: RunConfig, diagnosis: Diagnosis) -> None:
    """Check the function that writes the model, or the files of its checkpoint and of an adapter's base."""
    name = config.model.model_name_or_path
    if config.model.load_in_4bit:
        with diagnosis.noting():
            require_bitsandbytes("model.load_in_4bit")
    with diagnosis.noting():
        refuse_unread_revision(config.model)
        if names_function(name):
            load_function(name)
            diagnosis.checked.append(f"model: the function {name} loads")
            diagnosis.not_checked.append(f"model that {name} writes")
            return
        check_source(name, config.model.model_revision, diagnosis)


def check_source(name: str, revision: str, diagnosis: Diagnosis) -> None:
    """Check a checkpoint directory, or a hub name if its config is in the local cache."""
    directory = Path(name) if Path(name).exists() else cached_snapshot(name, revision)
    if directory is None:
        diagnosis.not_checked.append(f"model {name}, which is neither a directory here nor in the cache of the hub")
        return
    if not directory.is_dir():
        raise ModelError(f"model.model_name_or_path {name} is a file; name the directory of a checkpoint")
    base = check_checkpoint(directory)
    if directory == Path(name):
        check_weights(directory)
    diagnosis.checked.append(f"model {name}: its config")
    if base is not None:
        check_source(base, revision, diagnosis)


def cached_snapshot(name: str, revision: str) -> Path | None:
    """Return the directory of a hub name in the local cache, or None if it is not there.

    Raises ModelError if the name can only be a path, or is no valid hub name.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model.model_name_or_path {name} does not exist; name a checkpoint, a function or a hub name")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", ADAPTER_CONFIG)]
    except HFValidationError as error:
        raise ModelError(f"model.model_name_or_path {name} is neither a directory nor a hub name: {error}") from error
    return next((Path(path).parent for path in found if isinstance(path, str)), None)
