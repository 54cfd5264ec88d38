"""Conditions on a run's settings for a sharding and a number of ranks. This module imports no torch."""

from __future__ import annotations

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.parts import CHANGING_THE_BASE
from rl_vlm.config.schema import ModelConfig, RunConfig
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.errors import ConfigError, LaunchError, Problems

WHOLE_WEIGHTS = {
    "adamw_8bit": "its moments are quantized in blocks of 256 values, which shards would cut",
    "adafactor": "its moments are those of the rows and columns of whole matrices",
}
"""Optimizers that need whole weights, with the reason."""
UNSHARDED_WEIGHTS = "train with ddp or zero2"
"""Advice for runs whose weights cannot be sharded."""


def setup_problems(config: RunConfig, sharding: Sharding, num_ranks: int) -> Problems:
    """Collect the errors of a run's settings with this sharding and number of ranks.

    Packages need not be installed.
    """
    problems = sharding_problems(config, sharding)
    problems.call(batch_sizes, config, num_ranks)
    problems.call(refuse_divided_engine, config, num_ranks)
    return problems


def sharding_problems(config: RunConfig, sharding: Sharding) -> Problems:
    """Collect the errors of a run's settings with this sharding, whatever the number of ranks."""
    problems = Problems()
    problems.call(refuse_shards, config.train.optim, sharding)
    problems.call(refuse_quantization, config.model, sharding)
    problems.call(refuse_initialisation, config.model, sharding)
    return problems


def refuse_divided_engine(config: RunConfig, num_ranks: int) -> None:
    """Raise ConfigError if ranks share the models of an engine, and their number is no multiple of a model's ranks."""
    size = config.vllm.vllm_tensor_parallel_size
    if config.rollout.facts.spans_ranks and num_ranks % size:
        raise ConfigError(
            f"vllm.vllm_tensor_parallel_size {size} does not divide the run's {num_ranks} processes, which share "
            f"models with rollout.engine: {config.rollout.engine}"
        )


def refuse_shards(optim: str, sharding: Sharding) -> None:
    """Raise LaunchError if ranks would shard weights that an optimizer needs whole."""
    if sharding.shards_state and optim in WHOLE_WEIGHTS:
        raise LaunchError(
            f"train.optim: {optim} cannot be used with {sharding.name}: {WHOLE_WEIGHTS[optim]}. Use adamw_torch, whose "
            "moments are sharded, or train with ddp (launch/accelerate/ddp.yaml)"
        )


def refuse_quantization(config: ModelConfig, sharding: Sharding) -> None:
    """Raise ConfigError if 4-bit weights would be sharded."""
    if sharding.shards_weights and config.load_in_4bit:
        raise ConfigError(
            f"model.load_in_4bit cannot be used with {sharding.name}: the scales of 4-bit weights are not among the "
            f"parameters, and shards would lack them. To keep the quantized model whole on every process, "
            f"{UNSHARDED_WEIGHTS}; or set load_in_4bit to false"
        )


def refuse_initialisation(config: ModelConfig, sharding: Sharding) -> None:
    """Raise ConfigError if a new adapter is initialised from base weights, which most ranks do not load."""
    if sharding.shards_weights and config.use_peft and config.init_lora_weights in CHANGING_THE_BASE:
        raise ConfigError(
            f"model.init_lora_weights: {config.init_lora_weights} is computed from the base weights, but with "
            f"{sharding.name} only one process loads them: use true, gaussian or orthogonal, or {UNSHARDED_WEIGHTS}"
        )
