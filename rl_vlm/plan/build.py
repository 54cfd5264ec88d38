"""Make the memory plan of a run from its settings, for hardware that need not be here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_vlm.config.batches import plan_batches
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import family_of
from rl_vlm.model.loading import base_of, make_initial_model
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.model.vision import num_patches
from rl_vlm.plan.hardware import Card
from rl_vlm.plan.memory import Load, MemoryPlan, Rollouts
from rl_vlm.plan.packaged import packaged_config, packaged_models
from rl_vlm.plan.sharding import buffer_bytes
from rl_vlm.plan.tracing.activations import Activations, trace_activations
from rl_vlm.plan.tracing.groups import PromptSize, image_inputs, make_prompt
from rl_vlm.plan.vllm import CUDA_GRAPHS, VLLMMemory, batched_tokens, hf_cache_bytes, hf_logits_bytes, vllm_memory
from rl_vlm.plan.weights import Weights, count_weights, in_16_bits
from rl_vlm.stages import Stage
from rl_vlm.types import Prompt

ASSUMED_PIXELS = 2**20
"""Pixels of an image if `data.max_pixels` is not set."""
PLANNED_STAGES = (
    Stage.LOAD, Stage.GENERATION, Stage.OLD_LOGPROBS, Stage.REF_LOGPROBS, Stage.ENTROPY, Stage.TRAINING, Stage.UPDATE,
    Stage.WEIGHT_SYNC, Stage.SAVE,
)  # fmt: skip
MOST_TOKENS = 2**15
"""Largest `micro_batch_tokens` that `auto` chooses, which leaves the rest to what the plan does not know."""
ASSUMED_TEXT_TOKENS = 256
"""Tokens of a prompt's text if `data.max_prompt_length` is not set."""


@dataclass(frozen=True)
class Hardware:
    """The machines of a run."""

    card: Card
    gpus: int
    """GPUs of each node."""
    nodes: int
    sharding: Sharding

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

    @property
    def width(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def image_price(self) -> int:
        """Return the tokens that the image counts as in the budget: those of a trained vision tower."""
        return round(self.activations.patch_price * self.patches) if self.weights.trains_vision else 0


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


def inspect_model(config: RunConfig) -> Model:
    """Count the weights of the configured model, and trace its steps on a GPU with the largest prompts of the settings.

    Raises ConfigError if its config.json cannot be found, or if images of its family are not known.
    """
    with config_directory(config) as directory:
        found = read_config(config, directory)
        return traced_model(config, directory, found, make_prompt(found, prompt_size(config, found)), on_gpu=True)


def traced_model(config: RunConfig, directory: str, model_config: Any, prompt: Prompt, on_gpu: bool) -> Model:
    """Count the weights of a checkpoint's model, and trace its steps with this prompt."""
    weights = count_weights(config, directory)
    activations = trace_activations(with_built_in_loss(in_16_bits(config)), model_config, prompt, on_gpu)
    activations = replace(activations, fixed=activations.fixed + weights.dequantized_bytes)
    return Model(model_config, weights, activations, len(prompt.token_ids), num_patches(model_config, prompt))


def with_built_in_loss(config: RunConfig) -> RunConfig:
    """Return the settings without a loss of the user, which may read values. A loss per token holds next to nothing."""
    algorithm = config.algorithm
    return config.model_copy(
        update={"algorithm": algorithm.model_copy(update={"loss_type": "dapo"} if algorithm.has_own_loss else {})}
    )


def with_weights(config: RunConfig, model: Model) -> Model:
    """Return a traced model with the weights that `config` holds, whose activations are the same."""
    with config_directory(config) as directory:
        weights = count_weights(config, directory)
    fixed = model.activations.fixed - model.weights.dequantized_bytes + weights.dequantized_bytes
    return replace(model, weights=weights, activations=replace(model.activations, fixed=fixed))


def read_config(config: RunConfig, directory: str) -> Any:
    """Return the transformers config of a checkpoint. Raises ConfigError if there is none."""
    try:
        found = checkpoint_config(base_of(directory), config.model)
    except OSError as error:
        raise ConfigError(
            f"model.model_name_or_path {config.model.model_name_or_path!r} is no directory with a config.json, and "
            f"cannot be read from the hub. Models that can be planned without one: {', '.join(packaged_models())}"
        ) from error
    family_of(found)
    return found


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
    """Combine what was traced of a model with how a sharding holds it.

    With `micro_batch_tokens: auto` it is the plan with the largest micro-batches that fit, up to `MOST_TOKENS`, or with
    one completion if that does not fit.
    """
    least = single_completion(config, model)
    tokens = config.memory.micro_batch_tokens
    plan = MemoryPlan(
        card=hardware.card,
        num_ranks=hardware.num_ranks,
        sharding=hardware.sharding,
        optim=config.train.optim,
        weights=model.weights,
        activations=model.activations,
        rollouts=plan_rollouts(config, hardware, model),
        micro_batch_tokens=least if tokens == "auto" else tokens,
        load=micro_batch_load(config, model, least if tokens == "auto" else tokens),
        patches_per_token=frozen_patches_per_token(model),
        buffers=buffer_bytes(hardware.sharding, model.weights, hardware.num_ranks, model.width),
        largest_block=gathered_block(hardware, model),
        stages=planned_stages(config, hardware.num_ranks),
    )
    if tokens != "auto":
        return plan
    tokens = max(least, min(plan.largest_tokens, MOST_TOKENS))
    return replace(plan, micro_batch_tokens=tokens, load=micro_batch_load(config, model, tokens))


def micro_batch_load(config: RunConfig, model: Model, tokens: int) -> Load:
    """Return the largest micro-batch under the budget, or one completion if that is larger.

    A frozen vision tower is not in the budget: as many prompts as fit, with short completions, run through it at once.
    """
    budget = max(tokens, single_completion(config, model))
    if not model.weights.trains_vision:
        return Load(budget, model.patches * max(1, budget // (model.prompt_tokens + 1)))
    return Load(budget - model.image_price, model.patches)


def frozen_patches_per_token(model: Model) -> float:
    """Return the most patches per token of the budget that are not counted as tokens: those of a frozen tower."""
    return 0.0 if model.weights.trains_vision else model.patches / (model.prompt_tokens + 1)


def single_completion(config: RunConfig, model: Model) -> int:
    """Return the tokens of a prompt with one completion of the longest length, its image included."""
    return model.image_price + model.prompt_tokens + config.rollout.max_completion_length


def planned_stages(config: RunConfig, num_ranks: int) -> tuple[Stage, ...]:
    """Return the stages of the run that hold memory of their own, in their order.

    Raises ConfigError if the batch settings have no solution on this number of ranks.
    """
    algorithm = config.algorithm
    absent = {
        Stage.OLD_LOGPROBS: plan_batches(config, num_ranks).steps_per_window == 1,
        Stage.REF_LOGPROBS: algorithm.beta == 0,
        Stage.ENTROPY: algorithm.top_entropy_quantile == 1,
        Stage.WEIGHT_SYNC: not config.rollout.facts.has_own_weights,
    }
    return tuple(stage for stage in PLANNED_STAGES if not absent.get(stage, False))


def gathered_block(hardware: Hardware, model: Model) -> int:
    """Return the bytes of the largest block that is gathered to be sent or saved."""
    gathers = hardware.sharding.gathers(hardware.num_ranks)
    return max(model.weights.layer_bytes, model.weights.rest_bytes) if gathers else 0


def plan_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return what the rollout engine holds on a rank's device."""
    memory = config.rollout.facts.memory
    return Rollouts({}, 0) if memory is None else resolve_name(memory)(config, hardware, model)


def policy_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return what the trained model itself holds to sample: caches, logits, and its gathered weights."""
    sampled = config.rollout
    parts = {
        "KV cache": hf_cache_bytes(
            model.config, model.prompt_tokens, sampled.max_completion_length, sampled.num_generations,
            sampled.max_num_seqs,
        ),
        "logits": hf_logits_bytes(model.config, sampled.max_num_seqs),
    }  # fmt: skip
    weights, gathers = model.weights, hardware.sharding.gathers(hardware.num_ranks)
    by_layer = gathers and not sampled.ds3_gather_for_generation
    if config.model.dtype == "float32":
        parts["KV cache"] *= 2
    else:  # autocast keeps its copies of trained weights during a rollout, unless these are freed after each layer
        parts["LM head and copies"] = 2 * (weights.largest_trained if by_layer else weights.num_trained)
    if gathers:
        parts["gathered weights"] = weights.rest_bytes + weights.layer_bytes if by_layer else weights.bytes
    return Rollouts(parts, 0)


def vllm_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return what vLLM holds beside the trainer: its fraction of the card, or what it keeps there while it sleeps."""
    needed, utilization = vllm_needs(config, model, hardware.card), config.vllm.vllm_gpu_memory_utilization
    held = round(utilization * hardware.card.memory)
    sleeps = config.vllm.vllm_enable_sleep_mode
    cache = needed.cache(hardware.card, utilization)
    return Rollouts(
        {"vLLM": held - cache, "KV cache": cache},
        CUDA_GRAPHS if sleeps else held,  # which sleep mode does not free
        needed.weights if sleeps else 0,
        can_start=needed.num_sequences(hardware.card, utilization) > 0,
    )


def vllm_needs(config: RunConfig, model: Model, card: Card) -> VLLMMemory:
    """Return what vLLM needs on one GPU of this kind. Raises ConfigError if it cannot divide the model."""
    return vllm_memory(
        model.config,
        model.weights.num,
        model.weights.num_vision,
        model.prompt_tokens + config.rollout.max_completion_length,
        config.vllm.vllm_tensor_parallel_size,
        batched_tokens(card),
        enforce_eager=config.vllm.vllm_enforce_eager,
    )
