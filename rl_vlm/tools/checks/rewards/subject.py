"""The rows and the functions of a check: those of a run, or one function by its name. This module imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rewards.calling import parameters
from rl_vlm.config.function_names import names_function
from rl_vlm.config.load import config_with, load_config, parse_overrides
from rl_vlm.config.schema import DataConfig, RewardsConfig, RewardSpec, RunConfig
from rl_vlm.data.columns import prompt_columns
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import ConfigError
from rl_vlm.model.files import local_directory
from rl_vlm.reward.suite import RewardSuite

if TYPE_CHECKING:
    from rl_vlm.data.prompts import PromptBuilder

ENTRY_SETTINGS = [name for name in RewardSpec.model_fields if name != "function"]
"""Settings of a function that are read without a run."""
NO_PROMPT = "no prompt"
"""The prompt of rows without one, for functions that read none."""


def of_run(file: str, overrides: Sequence[str], dataset: str | None) -> tuple[DataConfig, RewardsConfig, RunConfig]:
    """Return the data, the functions and the settings of a run. `dataset` replaces its `data.dataset_name`."""
    run = load_config(file, overrides, {"data.dataset_name": dataset} if dataset else {})
    return run.data, run.rewards, run


def of_function(name: str, overrides: Sequence[str], dataset: str | None) -> tuple[DataConfig, RewardsConfig, None]:
    """Return the data `dataset` and one function, without a run. The overrides set both.

    Raises ConfigError if an override sets anything else.
    """
    of_entry = [text for text in overrides if text.partition("=")[0] in ENTRY_SETTINGS]
    entry, problems = parse_overrides(of_entry)
    if problems:
        raise ConfigError("\n".join(problems))
    base: dict[str, Any] = {
        "model.model_name_or_path": "none",
        "data.dataset_name": dataset,
        "rewards.reward_funcs": [{"function": name} | entry],
    }
    config = config_with(base, "command line", [text for text in overrides if text not in of_entry])
    allowed = {"model": {"model_name_or_path"}, "data": config.data.model_fields_set, "rewards": {"reward_funcs"}}
    others = [
        f"{section}.{name}"
        for section, settings in config
        for name in sorted(settings.model_fields_set - allowed.get(section, set()))
    ]
    if others:
        raise ConfigError(
            f"{', '.join(others)} has no effect on a check of one function: give the run's YAML file, or settings of "
            f"`data` and of the function's entry: {', '.join(ENTRY_SETTINGS)}"
        )
    return with_prompts(config.data, config.rewards), config.rewards, None


def with_prompts(data: DataConfig, rewards: RewardsConfig) -> DataConfig:
    """Return the data, with a made-up prompt in every row if rows have none and the function reads none."""
    if data.dataset_name is None or data.prompt_template is not None:
        return data
    filled = data.model_copy(update={"prompt_template": NO_PROMPT})
    columns = set(load_rows(filled, "train", max_rows=1).source.columns)
    if any(needed <= columns for needed in prompt_columns(None)):
        return data
    with RewardSuite(rewards) as suite:
        return data if "prompts" in parameters(suite.functions[0].function) else filled


def builder_of_videos(run: RunConfig) -> PromptBuilder | None:
    """Return the run's builder of prompts, or None if its data has no videos or its model is not on this machine."""
    from rl_vlm.data.prompts import load_processor
    from rl_vlm.plan.build import has_videos
    from rl_vlm.rollout.build import builder_for

    name = run.model.model_name_or_path
    if not has_videos(run.data) or names_function(name):
        return None
    directory = local_directory(name, run.model.model_revision)
    if directory is None:
        return None
    checkpoint = str(directory)
    return builder_for(load_processor(checkpoint, run.model, run.data), run, checkpoint)
