"""Make the memory plan of a run from its settings, for hardware that need not be here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError
from rl_vlm.functions import names_function
from rl_vlm.model.families import family_of
from rl_vlm.model.loading import base_of, make_initial_model
from rl_vlm.model.vision import num_patches
from rl_vlm.plan.activations import Activations, trace_activations
from rl_vlm.plan.engines import Engine
from rl_vlm.plan.groups import PromptSize, image_inputs, make_prompt
from rl_vlm.plan.hardware import Card
from rl_vlm.plan.memory import Load, MemoryPlan, Rollouts
from rl_vlm.plan.packaged import packaged_config, packaged_models
from rl_vlm.plan.weights import Weights, count_weights

ASSUMED_PIXELS = 2**20
"""Pixels of an image if `data.max_pixels` is not set."""
ASSUMED_TEXT_TOKENS = 256
"""Tokens of a prompt's text if `data.max_prompt_length` is not set."""


@dataclass(frozen=True)
class Hardware:
    """The machines of a run."""

    card: Card
    gpus: int
    """GPUs of each node."""
    nodes: int
    engine: Engine

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Model:
    """The model to plan for, with what was counted and traced of it."""

    config: Any
    """Its transformers config."""
    weights: Weights
    activations: Activations
    prompt_tokens: int
    patches: int
    """Patches of a prompt's image."""


@contextmanager
def config_directory(config: RunConfig) -> Iterator[str]:
    """Yield a directory with the model's config.json: a local one, a packaged one, or that of a function.

    Raises ConfigError if there is none. A name that is nothing of these is looked up on the hub.
    """
    name = config.model.model_name_or_path
    if names_function(name):
        with tempfile.TemporaryDirectory() as folder:
            make_initial_model(name, config.train.seed, Path(folder) / "initial_model")
            yield str(Path(folder) / "initial_model")
        return
    packaged = packaged_config(name)
    if packaged is not None and not Path(name).is_dir():
        yield str(packaged)
        return
    yield name


def inspect_model(config: RunConfig, size: PromptSize | None = None, on_gpu: bool = True) -> Model:
    """Count the weights of the configured model, and trace its steps.

    Raises ConfigError if its config.json cannot be found, or if images of its family are not known.
    """
    from transformers import AutoConfig

    with config_directory(config) as directory:
        try:
            found = AutoConfig.from_pretrained(
                base_of(directory),
                revision=config.model.model_revision,
                trust_remote_code=config.model.trust_remote_code,
            )
        except OSError as error:
            raise ConfigError(
                f"model.model_name_or_path {config.model.model_name_or_path!r} is no directory with a config.json, and "
                f"cannot be read from the hub. Models that can be planned without one: {', '.join(packaged_models())}"
            ) from error
        family_of(found)
        size = size or prompt_size(config, found)
        weights = count_weights(config, directory)
    prompt = make_prompt(found, size)
    activations = trace_activations(config, found, size, on_gpu)
    return Model(found, weights, activations, len(prompt.token_ids), num_patches(found, prompt))


def prompt_size(config: RunConfig, model_config: Any) -> PromptSize:
    """Return the largest prompt that the settings admit, with one image; what they leave open is assumed."""
    pixels = config.data.max_pixels or ASSUMED_PIXELS
    image_tokens, _ = image_inputs(model_config, pixels)
    longest = config.data.max_prompt_length
    text = ASSUMED_TEXT_TOKENS if longest is None else longest - image_tokens
    if text < 1:
        raise ConfigError(
            f"data.max_prompt_length {longest} leaves no room for text beside an image of {pixels:,} pixels, which has "
            f"{image_tokens} tokens: lower data.max_pixels, or raise max_prompt_length"
        )
    return PromptSize(pixels, text)


def plan_memory(config: RunConfig, hardware: Hardware, model: Model) -> MemoryPlan:
    """Combine what was traced of a model with how an engine holds it."""
    return MemoryPlan(
        card=hardware.card,
        num_ranks=hardware.num_ranks,
        engine=hardware.engine,
        optim=config.train.optim,
        weights=model.weights,
        activations=model.activations,
        rollouts=plan_rollouts(config, hardware, model),
        load=micro_batch_load(config, model),
        largest_block=gathered_block(hardware, model),
        has_logprobs_pass=has_logprobs_pass(config),
    )


def micro_batch_load(config: RunConfig, model: Model) -> Load:
    """Return the largest micro-batch under the budget, or one completion if that is larger.

    A frozen vision tower is not in the budget: as many prompts as fit, with short completions, run through it at once.
    """
    price = round(model.activations.patch_price * model.patches)
    budget = max(config.memory.micro_batch_tokens, single_completion(config, model))
    if config.model.freeze_vision_tower:
        return Load(budget, model.patches * max(1, budget // (model.prompt_tokens + 1)))
    return Load(budget - price, model.patches)


def single_completion(config: RunConfig, model: Model) -> int:
    """Return the tokens of a prompt with one completion of the longest length, its image included."""
    price = 0 if config.model.freeze_vision_tower else round(model.activations.patch_price * model.patches)
    return price + model.prompt_tokens + config.rollout.max_completion_length


def has_logprobs_pass(config: RunConfig) -> bool:
    """Return whether a window needs log-probs beside those of training: of the reference, or of older weights."""
    train, algorithm = config.train, config.algorithm
    several_updates = algorithm.num_iterations > 1 or (train.steps_per_generation or 0) > (
        train.gradient_accumulation_steps or 1
    )
    return algorithm.beta > 0 or several_updates or algorithm.top_entropy_quantile < 1


def gathered_block(hardware: Hardware, model: Model) -> int:
    """Return the bytes of the largest block that is gathered to be sent or saved."""
    sharded = hardware.engine.shards_weights and hardware.num_ranks > 1
    return max(model.weights.layer_bytes, model.weights.rest_bytes) if sharded else 0


def plan_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return what the rollout engine holds on a rank's device."""
    engine = config.rollout.engine
    if engine == "vllm_server":
        return Rollouts(engine, {}, 0)
    if engine == "vllm":
        held = round(config.vllm.vllm_gpu_memory_utilization * hardware.card.memory)
        return Rollouts(engine, {"vLLM": held}, 0 if config.vllm.vllm_enable_sleep_mode else held)
    sampled = config.rollout.max_num_seqs * (model.prompt_tokens + config.rollout.max_completion_length)
    parts = {"KV cache": sampled * cache_bytes_per_token(config, model.config)}
    if config.model.dtype == "bfloat16":  # autocast keeps its copies of trained weights during a rollout
        parts["LM head and copies"] = 2 * model.weights.num_trained
    if hardware.engine.shards_weights and hardware.num_ranks > 1:
        whole = model.weights.bytes if config.rollout.ds3_gather_for_generation else model.weights.rest_bytes
        parts["gathered weights"] = whole
    return Rollouts(engine, parts, 0)


def cache_bytes_per_token(config: RunConfig, model_config: Any) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    text = model_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = 2 if config.model.dtype == "bfloat16" else 4
    return 2 * text.num_hidden_layers * heads * head_dim * size
