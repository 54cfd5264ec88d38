"""What a model needs so that ranks can shard its weights: every rank calls the same modules equally often."""

from __future__ import annotations

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError, ModelError
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
