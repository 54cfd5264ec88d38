"""Construction of the parts that trajectories need, for a run or for an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rl_vlm.config.schema import RolloutConfig, RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import Rows
from rl_vlm.data.turns import TurnFormat
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, Problems
from rl_vlm.model.families import family_of
from rl_vlm.model.loading import checkpoint_config, token_rules
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.environments.context_policy import ContextPolicy
from rl_vlm.rollout.environments.contract import COLUMN, Toolbox
from rl_vlm.rollout.environments.driver import Trajectories
from rl_vlm.rollout.environments.instances import Instances
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.environments.turns import TurnLimits
from rl_vlm.types import Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TurnFormats:
    """How turns are written for one model, and the builder of prompts with tools."""

    formats: dict[str | None, TurnFormat]
    """By the names of environments."""
    builder: PromptBuilder


class EnvironmentPrompts(PromptBuilder):
    """Builds prompts that tell the model of the tools of the row's environment."""

    def __init__(self, builders: Mapping[str | None, PromptBuilder]) -> None:
        first = next(iter(builders.values()))
        super().__init__(
            first.processor, first.data, first.max_tokens, first.template_kwargs, video_format=first.video_format,
            most_videos=first.most_videos,
        )  # fmt: skip
        self.builders = builders

    def build(self, sample: Sample) -> Prompt:
        """Build the sample's prompt. See `PromptBuilder`."""
        return self.builders[sample.columns.get(COLUMN)].build(sample)

    def text(self, sample: Sample) -> str:
        """Return the sample's prompt as text, with one placeholder per image."""
        return self.builders[sample.columns.get(COLUMN)].text(sample)


def load_functions(config: RunConfig) -> tuple[Toolbox, RewardSuite]:
    """Load the tools, the environments and the reward functions. Raises an error with the problems of all of them."""
    problems = Problems()
    toolbox = problems.call(load_toolbox, config.rollout)
    unknown = None if config.rollout.environment is None else []
    rewards = problems.call(RewardSuite, config.rewards, unknown if toolbox is None else toolbox.rewarding)
    if rewards is None and toolbox is not None:
        toolbox.close()
    problems.refuse()
    assert toolbox is not None and rewards is not None
    return toolbox, rewards


def check_isolation(rollout: RolloutConfig, keeps_instances: bool) -> None:
    """Raise ConfigError if reward functions look at environments that are in other processes."""
    if keeps_instances and rollout.environment_isolation == "process":
        raise ConfigError(
            "rollout.environment_isolation is process, and a reward function names `environments`: instances in other "
            "processes cannot be given to it; let it read `turns`, write a method `get_reward` of the environment, or "
            "set environment_isolation to thread"
        )


def choose_turns(config: RunConfig, checkpoint: str, builder: PromptBuilder, toolbox: Toolbox) -> TurnFormats:
    """Choose how turns are written for a checkpoint. Raises ConfigError if its chat template cannot write them."""
    rollout = config.rollout
    takes_images = family_of(checkpoint_config(checkpoint, config.model)).first_images_only is None
    stops = token_rules(config.model, checkpoint, builder.processor.tokenizer).stop
    formats = {
        name: TurnFormat.choose(
            builder, stops, [*toolbox.schemas, *(kind.schemas if kind else [])], rollout.tool_format,
            rollout.observation_role, takes_images, takes_videos=rollout.facts.samples_from_policy,
        )
        for name, kind in (toolbox.kinds or {None: None}).items()
    }  # fmt: skip
    for description in dict.fromkeys(each.description for each in formats.values()):
        logger.info("%s", description)
    if config.data.video_format == "native" and not rollout.facts.samples_from_policy:
        logger.warning(
            "data.video_format: native is about videos of rows: with rollout.engine %s, videos that environments show "
            "are frames as images",
            rollout.engine,
        )
    builders = {name: each.builder for name, each in formats.items()}
    return TurnFormats(formats, builders[None] if None in builders else EnvironmentPrompts(builders))


def checked_turns(
    config: RunConfig, checkpoint: str, builder: PromptBuilder, toolbox: Toolbox, rows: Rows, keeps_instances: bool,
    num_at_once: int,
) -> TurnFormats:  # fmt: skip
    """Check the environments of rows and their number, and choose how turns are written.

    `keeps_instances` says whether reward functions look at environments, of which `num_at_once` completions are scored
    together. Raises ConfigError with all problems at once.
    """
    problems = Problems()
    problems.call(check_num_environments, config.rollout.max_environments, keeps_instances, num_at_once)
    problems.call(check_isolation, config.rollout, keeps_instances)
    problems.call(toolbox.check_rows, rows)
    turns = problems.call(choose_turns, config, checkpoint, builder, toolbox)
    problems.refuse()
    assert turns is not None
    return turns


def check_num_environments(most: int | None, keeps_instances: bool, num_at_once: int) -> None:
    """Raise ConfigError if the environments of completions that are scored together must be kept, and are too many."""
    if keeps_instances and most is not None and most < num_at_once:
        raise ConfigError(
            f"rollout.max_environments {most} is too small: a reward function names `environments`, so the "
            f"environments of all {num_at_once} completions that a process scores together must be kept; set it to "
            f"{num_at_once}, or leave it out"
        )


def build_trajectories(
    config: RunConfig, toolbox: Toolbox, turns: TurnFormats, keeps_instances: bool, ranks: Ranks
) -> Trajectories:
    """Build the generator of trajectories. `keeps_instances` says whether reward functions look at environments."""
    rollout = config.rollout
    longest = config.data.max_prompt_length
    if "vllm_max_model_length" in rollout.facts.reads and config.vllm.vllm_max_model_length is not None:
        fitting = config.vllm.vllm_max_model_length - rollout.max_completion_length
        longest = fitting if longest is None else min(longest, fitting)
    limits = TurnLimits(
        rollout.max_turns, rollout.max_turn_tokens, rollout.tool_timeout, rollout.tool_errors == "mask",
        config.data.max_image_pixels, longest,
        None if rollout.keep_images is None else ContextPolicy(rollout.keep_images, rollout.edit_every),
    )  # fmt: skip
    together = ranks if config.shares_engines and ranks.world_size > 1 else None
    return Trajectories(
        toolbox, turns.formats, limits, Instances(rollout.max_environments), keeps_instances, together
    )  # fmt: skip
