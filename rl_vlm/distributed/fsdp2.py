"""FSDP2 (torch's `fully_shard`): every rank holds a part of each weight, gradient and moment, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.layers import layers_of, receive_weights
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import Strategy


class FSDP2(Strategy):
    """Gathers each layer's weights for its forward and its backward.

    accelerate ignores its own FSDP plugin on CPUs, so this class calls `fully_shard` on CPUs and GPUs alike.
    """

    def __init__(self, ranks: Ranks, config: RunConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(ranks, ranks.launch.sharding, config.train.max_grad_norm)
        self.launch = ranks.launch
        self.mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))

    def place(self, policy: Any) -> None:
        """Shard the policy, one layer after the other, with the weights of rank 0."""
        self.shard(policy, self.launch.reshard_after_forward)

    def place_frozen(self, policy: Any) -> None:
        self.shard(policy, reshard=True)

    def shard(self, policy: Any, reshard: bool) -> None:
        """Shard a policy. With `reshard`, layers free their weights after each forward; other modules always do.

        Layers are gathered in the compute precision, and their gradients are summed in float32. Weights outside of
        layers, such as embeddings and the LM head, are gathered as they are held.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # A layer's inputs keep their dtype: rotary angles are float32.
        precision = MixedPrecisionPolicy(policy.compute_dtype, torch.float32, cast_forward_inputs=False)
        for layer in layers_of(policy, self.launch.layers):
            receive_weights(layer, self.ranks)
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=reshard, mp_policy=precision)
        receive_weights(policy, self.ranks)
        fully_shard(policy, mesh=self.mesh, reshard_after_forward=True)
        policy.to(self.ranks.device)  # buffers

    def prepare(self, policy: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the policy, which computes gradients of its shards."""
        self.trains_adapter = policy.model is not policy.transformer
        return super().prepare(policy, optimizer)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Reduce an adapter's gradients in the last micro-batch of a step.

        Other gradients are reduced to shards in every micro-batch, since unsharded ones would take too much memory.
        """
        self.policy.set_requires_gradient_sync(last or not self.trains_adapter)
        return nullcontext()

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        (loss * (self.ranks.world_size if is_share else 1)).backward()  # FSDP2 averages over ranks

    def gathered(self) -> AbstractContextManager[None]:
        return self.unsharded([self.policy, *self.layers()])

    @contextmanager
    def gathered_by_layer(self) -> Iterator[None]:
        for layer in self.layers():
            layer.set_reshard_after_forward(True, recurse=False)
        try:
            with self.unsharded([self.policy]):  # the weights outside of layers
                yield
        finally:
            for layer in self.layers():
                layer.set_reshard_after_forward(self.launch.reshard_after_forward, recurse=False)

    def layers(self) -> list[Any]:
        """Return the policy's sharded layers."""
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self.policy.modules() if isinstance(module, FSDPModule)][1:]

    @contextmanager
    def unsharded(self, units: Sequence[Any]) -> Iterator[None]:
        """Gather the weights of sharded modules within the context. The first module is the policy."""
        units[0]._get_fsdp_state()._lazy_init()  # else the first layer that is called would become the root
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()
                reshard = unit is self.policy or self.launch.reshard_after_forward
                unit.set_reshard_after_forward(reshard, recurse=False)
            # Ranks may have run other forwards, and would prefetch other layers in the next backward.
            units[0].reset_iter_state()

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Any] = self.optimizer.state.get(parameter, {})
        return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}

    def load_optimizer_state(self, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Load unsharded optimizer states; each rank keeps its part."""
        for parameter, state in states.items():
            self.optimizer.state[parameter] = {
                name: value.to(self.ranks.device, copy=True) if name == "step" else self.part(value, parameter)
                for name, value in state.items()
            }

    def part(self, value: Tensor, parameter: Any) -> Tensor:
        """Return this rank's part of a tensor that every rank has, sharded like a parameter."""
        value = value.to(self.ranks.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
