"""Construction of the parts that trajectories need, for a run or for an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.turns import TurnFormat
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import family_of
from rl_vlm.model.loading import checkpoint_config, token_rules
from rl_vlm.rollout.environments.contract import COLUMN, Toolbox
from rl_vlm.rollout.environments.driver import Trajectories, TurnLimits
from rl_vlm.rollout.environments.instances import Instances
from rl_vlm.types import Prompt, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """How turns are written for one model, and the builder of prompts with tools."""

    formats: dict[str | None, TurnFormat]
    """By the names of environments."""
    builder: PromptBuilder


class EnvironmentPrompts(PromptBuilder):
    """Builds prompts that tell the model of the tools of the row's environment."""

    def __init__(self, builders: Mapping[str | None, PromptBuilder]) -> None:
        first = next(iter(builders.values()))
        super().__init__(first.processor, first.data, first.max_tokens, first.template_kwargs)
        self.builders = builders

    def build(self, sample: Sample) -> Prompt:
        """Build the sample's prompt. See `PromptBuilder`."""
        return self.builders[sample.columns.get(COLUMN)].build(sample)

    def text(self, sample: Sample) -> str:
        """Return the sample's prompt as text, with one placeholder per image."""
        return self.builders[sample.columns.get(COLUMN)].text(sample)


def choose_turns(config: RunConfig, checkpoint: str, builder: PromptBuilder, toolbox: Toolbox) -> Turns:
    """Choose how turns are written for a checkpoint. Raises ConfigError if its chat template cannot write them."""
    rollout = config.rollout
    takes_images = family_of(checkpoint_config(checkpoint, config.model)).first_images_only is None
    stops = token_rules(config.model, checkpoint, builder.processor.tokenizer).stop
    formats = {
        name: TurnFormat.choose(
            builder, stops, [*toolbox.schemas, *(kind.schemas if kind else [])], rollout.tool_format,
            rollout.observation_role, takes_images,
        )
        for name, kind in (toolbox.kinds or {None: None}).items()
    }  # fmt: skip
    for description in dict.fromkeys(each.description for each in formats.values()):
        logger.info("%s", description)
    builders = {name: each.builder for name, each in formats.items()}
    return Turns(formats, builders[None] if None in builders else EnvironmentPrompts(builders))


def build_trajectories(
    config: RunConfig, toolbox: Toolbox, turns: Turns, keeps_instances: bool, num_at_once: int, ranks: Ranks
) -> Trajectories:
    """Build what generates trajectories.

    `keeps_instances` says whether reward functions look at environments, of which `num_at_once` completions are scored
    together. Raises ConfigError if there are fewer environments.
    """
    rollout = config.rollout
    if keeps_instances and rollout.max_environments is not None and rollout.max_environments < num_at_once:
        raise ConfigError(
            f"rollout.max_environments {rollout.max_environments} is too small: a reward function names "
            f"`environments`, so the environments of all {num_at_once} completions of a window must be kept"
        )
    longest = config.data.max_prompt_length
    if "vllm_max_model_length" in rollout.facts.reads and config.vllm.vllm_max_model_length is not None:
        fitting = config.vllm.vllm_max_model_length - rollout.max_completion_length
        longest = fitting if longest is None else min(longest, fitting)
    limits = TurnLimits(
        rollout.max_turns, rollout.max_turn_tokens, rollout.tool_timeout, rollout.tool_errors == "mask",
        config.data.max_image_pixels, longest,
    )  # fmt: skip
    together = ranks if rollout.facts.spans_ranks and ranks.world_size > 1 else None
    return Trajectories(
        toolbox, turns.formats, limits, Instances(rollout.max_environments), keeps_instances, together
    )  # fmt: skip
