"""Construction of the configured rollout engine, for training or for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.errors import ConfigError
from rl_vlm.model.loading import longest_prompt, native_or_frames
from rl_vlm.rollout.endpoint import MessageBuilder, OpenAIEngine
from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.rollout.weights import PolicyWeights

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def training_engine(
    config: RunConfig, initial: str, weights: PolicyWeights, builder: PromptBuilder, ranks: Ranks
) -> RolloutEngine:
    """Build an engine that starts with the weights of `initial` and then receives the policy's.

    Raises ConfigError if the engine cannot load the adapter, or if there is none to merge.
    """
    engine = config.rollout.facts
    if engine.has_own_weights and config.rollout.lora_sync == "merge" and not weights.has_adapter:
        raise ConfigError("rollout.lora_sync has no effect without an adapter; leave it out, or set model.use_peft")
    return resolve_name(engine.training)(config, initial, weights, builder, ranks)


def gathering(
    config: RunConfig, engine: Any, strategy: Strategy, ranks: Ranks
) -> Callable[[], AbstractContextManager[None]]:
    """Return the context for generation. It gathers the weights if the engine samples from the policy itself.

    Raises ConfigError if `ds3_gather_for_generation: false` has no effect.
    """
    whole = config.rollout.ds3_gather_for_generation
    if not whole and not strategy.equal_calls:
        raise ConfigError(
            f"rollout.ds3_gather_for_generation: false has no effect with {strategy.name}, where every rank holds all "
            "weights; leave it out"
        )
    if config.rollout.facts.has_own_weights:
        return nullcontext
    if whole:
        return strategy.gathered

    @contextmanager
    def layer_by_layer() -> Iterator[None]:
        with strategy.gathered_by_layer(), engine.in_lockstep(ranks):
            yield

    return layer_by_layer


def prompt_builder(
    config: RunConfig, checkpoint: str, most_videos: int | None = None
) -> PromptBuilder | MessageBuilder:
    """Return a builder with the checkpoint's processor, or one that leaves the rendering to the endpoint.

    `most_videos` is the largest number of videos in a row.
    """
    if config.evaluation.endpoint_url is not None:
        return MessageBuilder()
    processor = load_processor(checkpoint, config.model, config.data)
    return builder_for(processor, config, checkpoint, most_videos)


def builder_for(
    processor: ProcessorMixin, config: RunConfig, checkpoint: str, most_videos: int | None = None
) -> PromptBuilder:
    """Return a builder of prompts that fit into the model of a checkpoint, with videos in its form.

    `most_videos` is the largest number of videos in a row, or None if the rows are not known.
    """
    form, longest = native_or_frames(config, checkpoint, most_videos), longest_prompt(config, checkpoint)
    return PromptBuilder(processor, config.data, longest, video_format=form, most_videos=most_videos)


def evaluation_engine(
    config: RunConfig, checkpoint: str, builder: PromptBuilder | MessageBuilder, ranks: Ranks
) -> RolloutEngine:
    """Build an engine that samples from `checkpoint`, or from the endpoint. Close it after use."""
    if isinstance(builder, MessageBuilder):
        return OpenAIEngine(config)
    return resolve_name(config.rollout.facts.evaluation)(config, checkpoint, builder, ranks)
