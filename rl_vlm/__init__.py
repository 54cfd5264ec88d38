"""GRPO post-training for vision-language models. `GRPOTrainer` is imported when it is first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vlm.grpo_trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name == "GRPOTrainer":
        from rl_vlm.grpo_trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
