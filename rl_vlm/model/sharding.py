"""Conditions for sharding a model's weights: every rank must call the same modules equally often.

This holds for the backward pass as well.
"""

from __future__ import annotations

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.setup import UNSHARDED_WEIGHTS
from rl_vlm.errors import ConfigError, ModelError, listed
from rl_vlm.model.head import is_plain_head
from rl_vlm.model.policy import Policy


def refuse_unlike_weights(policy: Policy, ranks: Ranks) -> None:
    """Raise ModelError if a rank has other weight names than rank 0, which has read the checkpoint."""
    names = ranks.gather([sorted(name for name, _ in policy.named_parameters())])
    if unlike := {name for others in names for name in set(names[0]) ^ set(others)}:
        raise ModelError(
            f"the checkpoint's config.json ties weights that differ in the checkpoint ({listed(unlike)}). Only the "
            "process that reads it has both: set tie_word_embeddings to false in config.json, or use ddp.yaml"
        )


def refuse_unshardable(policy: Policy, sharding: str) -> None:
    """Raise an error if ranks would call the policy's modules unequally often, and wait for each other forever.

    Raises ModelError if the family is the cause, ConfigError if an adapter is. `sharding` is the name of the sharding
    in the message.
    """
    reason = policy.family.unshardable
    if reason is not None:
        raise ModelError(
            f"{policy.family.model_type} cannot be trained with {sharding}: {reason}, so processes could wait for each "
            f"other forever: {UNSHARDED_WEIGHTS}"
        )
    if not is_plain_head(policy.transformer.get_output_embeddings()):
        raise ConfigError(
            f"model.lora_target_modules: an adapter on the LM head cannot be trained with {sharding}, because "
            f"processes call the head unequally often: leave the head out, or {UNSHARDED_WEIGHTS}"
        )


def require_input_gradients(policy: Policy) -> None:
    """Make the backward pass reach the input of the language model's first layer, if the vision tower is trained.

    If the embeddings are frozen, as with LoRA, only rows with images would have a gradient there. Ranks with text rows
    would then communicate the first layer's gradients at another time.
    """
    if not policy.vision.is_frozen:
        embeddings = policy.transformer.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
