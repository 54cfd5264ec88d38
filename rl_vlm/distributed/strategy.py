"""How the ranks hold the model: the interface of DDP, DeepSpeed ZeRO and FSDP2, and the choice between them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any

from torch import Tensor, nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.gradients import clip_and_update, reserve_update
from rl_vlm.distributed.launch_variables import check_precision
from rl_vlm.distributed.optim import load_optimizer_state, optimizer_state
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.setup import sharding_problems
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.errors import require_bitsandbytes


class Strategy:
    """Holds weights, gradients and optimizer state on the ranks. All ranks call each method together.

    The methods of this class shard no weights, and use an optimizer of torch. Other strategies override them.
    """

    def __init__(self, ranks: Collectives, sharding: Sharding, max_grad_norm: float) -> None:
        self.ranks = ranks
        self.sharding = sharding
        self.name = sharding.name
        self.max_grad_norm = max_grad_norm
        self.loads_empty = sharding.shards_weights and not ranks.is_main
        """Whether this rank loads models without weights; `place` gets them from rank 0."""
        self.equal_calls = sharding.shards_weights
        """Whether all ranks must call every module equally often, because each call all-gathers its weights."""
        self.needs_all_gradients = sharding.kind.needs_all_gradients
        """Whether every micro-batch must give a gradient to the vision tower, even if it has no image."""
        self.is_sharded = sharding.shards_state
        """Whether optimizer state is sharded. Then every rank writes a part of a checkpoint, and ranks communicate in
        every backward, so they must run equally many."""

    def place(self, policy: Any) -> None:
        """Move a policy to the rank's device, and shard it if this strategy shards weights."""
        policy.to(self.ranks.device)

    def place_frozen(self, policy: Any) -> None:
        """Place a policy that is not trained."""
        self.place(policy)

    def prepare(self, policy: Any, optimizer: Any) -> nn.Module:
        """Connect a placed policy with its optimizer, and return the module to call for training."""
        self.policy, self.optimizer = policy, optimizer
        return policy

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Run one micro-batch's forward and backward in this context. `last` marks the last one of the step."""
        return nullcontext()

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        """Backpropagate a loss. With `is_share`, it is this rank's share of a sum over ranks.

        Otherwise its gradients already have the factor that turns an average over ranks into a sum.
        """
        loss.backward()

    def reserve_update(self) -> None:
        """Allocate the memory that `update` needs to change weights. Call this first; a second call does no harm."""
        reserve_update(self.optimizer)

    def update(self, loss_is_finite: bool) -> tuple[float, bool]:
        """Sum the gradients over ranks, clip them, and update the weights if they and the loss are finite on all ranks.

        `loss_is_finite` refers to the loss over all ranks. Returns the gradient's global norm before clipping, and
        whether the weights were updated.
        """
        return clip_and_update(self.ranks, self.optimizer, self.max_grad_norm, loss_is_finite)

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def gathered(self) -> AbstractContextManager[None]:
        """All-gather the policy's weights, for forwards that ranks run independently of each other."""
        return nullcontext()

    def gathered_by_layer(self) -> AbstractContextManager[None]:
        """Run forwards of the policy's modules, which gather their weights layer by layer. Ranks run them together."""
        return nullcontext()

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's unsharded optimizer state, or nothing if it was never updated."""
        return optimizer_state(self.optimizer, parameter)

    def load_optimizer_state(self, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Load unsharded optimizer states, as `optimizer_state` returns them."""
        for parameter, state in states.items():
            load_optimizer_state(self.optimizer, parameter, state)


def select_strategy(ranks: Ranks, config: RunConfig) -> Strategy:
    """Return the strategy that the launcher asks for. Raises an error if it contradicts the run's settings."""
    check_precision(ranks.launch.mixed_precision, config.model.precision)
    sharding_problems(config, ranks.launch.sharding).refuse()
    if config.train.optim == "adamw_8bit":
        require_bitsandbytes("train.optim: adamw_8bit")
    return resolve_name(ranks.launch.facts.strategy)(ranks, config)
