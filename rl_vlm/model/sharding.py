"""What a model needs so that ranks can shard its weights: every rank calls the same modules equally often."""

from __future__ import annotations

from rl_vlm.config.schema import ModelConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, ModelError, listed
from rl_vlm.model.policy import Policy, is_plain_head

NEEDS_WEIGHTS = ("pissa", "olora")
"""Initialisations of adapters that are computed from the base weights, and change them."""


def refuse_initialisation(config: ModelConfig, strategy: str) -> None:
    """Raise ConfigError if a new adapter is initialised from base weights, which most ranks do not load.

    `strategy` is the name of the strategy that shards the model.
    """
    if config.use_peft and config.init_lora_weights in NEEDS_WEIGHTS:
        raise ConfigError(
            f"model.init_lora_weights: {config.init_lora_weights} is computed from the base weights, and with "
            f"{strategy} only one process loads them: use true, gaussian or orthogonal, or train with DDP or ZeRO-2"
        )


def refuse_quantization(config: ModelConfig, strategy: str) -> None:
    """Raise ConfigError if weights of 4 bits would be sharded. `strategy` is the name of the strategy that does so."""
    if config.load_in_4bit:
        raise ConfigError(
            f"model.load_in_4bit cannot be used with {strategy}: the scales of 4-bit weights are not among the "
            "parameters, and shards would lack them. Train with DDP or ZeRO-2, where every process holds the quantized "
            "model, or set load_in_4bit to false"
        )


def refuse_unlike_weights(policy: Policy, ranks: Ranks) -> None:
    """Raise ModelError if the ranks have made other weights than rank 0, which has read the checkpoint."""
    names = ranks.gather([sorted(name for name, _ in policy.named_parameters())])
    if unlike := {name for others in names for name in set(names[0]) ^ set(others)}:
        raise ModelError(
            f"the checkpoint's config.json ties weights that differ in the checkpoint ({listed(unlike)}), so that only "
            "the process that reads it knows them: set tie_word_embeddings to false in config.json, or use ddp.yaml"
        )


def refuse_unshardable(policy: Policy, strategy: str) -> None:
    """Raise an error if ranks would not call the policy's modules equally often, and so wait for each other forever.

    Raises ModelError because of the family, or ConfigError because of an adapter. `strategy` is the name of the
    strategy that shards the model.
    """
    reason = policy.family.unshardable
    if reason is not None:
        raise ModelError(
            f"{policy.family.model_type} cannot be trained with {strategy}: {reason}, so processes would wait for each "
            "other forever. Train it with DDP or ZeRO-2"
        )
    if not is_plain_head(policy.transformer.get_output_embeddings()):
        raise ConfigError(
            f"model.lora_target_modules: an adapter on the LM head cannot be trained with {strategy}, because "
            "processes call the head unequally often: leave the head out, or train with DDP or ZeRO-2"
        )
