"""The frozen reference model of the KL term."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shards import local_part
from rl_vlm.errors import ConfigError
from rl_vlm.model.dropout import disable_dropout
from rl_vlm.model.files import is_adapter
from rl_vlm.model.loading import INITIAL_ADAPTER, load_policy
from rl_vlm.model.lora import adapter_layers
from rl_vlm.model.policy import Policy
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.types import Forward, PolicyOutput

logger = logging.getLogger(__name__)


class Reference:
    """The frozen model of the KL term. It has the run's initial weights, until `move_towards_policy` moves them."""

    def __init__(self, policy: Policy, frozen: Policy | None) -> None:
        """`frozen` is a separate model. If None, the policy's base model or initial adapter is the reference."""
        self.policy = policy
        self.frozen = frozen

    @property
    def vision(self) -> VisionEncoder:
        return (self.frozen or self.policy).vision

    @property
    def counters(self) -> Counter[str]:
        """Return the separate model's counters of this step. Without such a model, the policy counts these forwards."""
        return Counter() if self.frozen is None else self.frozen.counters

    def start_step(self) -> None:
        """Clear the counters and the cached image features of the last optimizer step."""
        if self.frozen is not None:
            self.frozen.start_step()

    @torch.no_grad()
    def __call__(self, work: Forward) -> PolicyOutput:
        """Compute the log-probs and entropies of a micro-batch under the reference."""
        if self.frozen is not None:
            return self.frozen(work)
        with self.initial_adapter():
            return self.policy(work)

    @contextmanager
    def initial_adapter(self) -> Iterator[None]:
        """Run the block with the policy's initial weights: with its initial adapter, or without one if it began so.

        PEFT's own methods also set `requires_grad` of the adapters. FSDP2 reads it when it first gathers a weight. If
        that were in this block, FSDP2 would never train the weight.
        """
        model = self.policy.model
        has_initial = INITIAL_ADAPTER in model.peft_config
        name, value = ("_active_adapter", [INITIAL_ADAPTER]) if has_initial else ("_disable_adapters", True)
        layers = list(adapter_layers(model).values())
        before = [getattr(layer, name) for layer in layers]
        for layer in layers:
            setattr(layer, name, value)
        try:
            yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                setattr(layer, name, own)

    @torch.no_grad()
    def move_towards_policy(self, alpha: float) -> None:
        """Set `reference = alpha * policy + (1 - alpha) * reference` (TR-DPO, arXiv:2404.09656)."""
        assert self.frozen is not None, "the config refuses sync_ref_model with adapters"
        for frozen, trained in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            part = local_part(frozen)
            part.lerp_(local_part(trained).to(part.dtype), alpha)


def add_initial_adapter(config: RunConfig, initial: str, policy: Policy) -> None:
    """Add a frozen copy of the run's initial adapter to the policy, if the KL term has it as reference.

    Raises ConfigError if `sync_ref_model` is set, since this reference cannot move.
    """
    if config.algorithm.beta == 0 or not is_adapter(initial):
        return
    if config.algorithm.sync_ref_model:
        raise ConfigError(
            f"algorithm.sync_ref_model: the reference of an adapter ({initial}) cannot move; set it to false"
        )
    policy.model.load_adapter(initial, adapter_name=INITIAL_ADAPTER, is_trainable=False)
    disable_dropout(policy.model)


def load_reference(
    config: RunConfig, initial: str, policy: Policy, resumed: Path | None, empty: bool = False
) -> Reference | None:
    """Load the reference into host memory. Return None if `beta` is 0.

    A reference that has moved is loaded from the resumed checkpoint. For `empty` see `load_policy`.
    """
    if config.algorithm.beta == 0:
        return None
    if config.model.use_peft or is_adapter(initial):
        return Reference(policy, frozen=None)
    moved = resumed / "reference" if resumed else None
    weights = moved if moved and moved.is_dir() else None
    features = policy.vision.features if policy.vision.is_frozen else None
    logger.info("loading the reference model")
    frozen = load_policy(config, initial, weights, policy.vision.idle_prompt, features, empty)
    return Reference(policy, frozen.requires_grad_(False).eval())
