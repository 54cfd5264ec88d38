"""DeepSpeed ZeRO: ranks share optimizer state (stage 1), gradients (stage 2) and weights (stage 3)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.layers import layers_of, receive_weights
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import rank_part, whole_shape
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.distributed.zero_config import check_zero_config, row_of, zero_config
from rl_vlm.errors import LaunchError

OLDEST_VERSION, FIRST_UNTESTED = "0.19.8", "0.20"
MOMENTS = ("exp_avg", "exp_avg_sq")

logger = logging.getLogger(__name__)


class ZeRO(Strategy):
    """Uses DeepSpeed's engine.

    DeepSpeed 0.19.8 keeps gradients of the last step in its buffers. It replaces them in the first micro-batch of a
    step, and copies sums to an offloaded optimizer in the last one, but only for weights that have a gradient there.
    """

    def __init__(self, ranks: Ranks, config: RunConfig) -> None:
        """Raise LaunchError if DeepSpeed is missing or too old, or if its config contradicts the run."""
        import_deepspeed()
        check_zero_config(ranks.launch.deepspeed, config, ranks.world_size)
        self.config = config
        self.settings = ranks.launch.deepspeed
        super().__init__(ranks, row_of(self.settings["zero_optimization"]), config.train.max_grad_norm)

    def deepspeed_config(self, hidden_size: int) -> dict[str, Any]:
        """Return a new config for `deepspeed.initialize`."""
        return zero_config(self.settings, self.config, hidden_size, self.ranks.device.type != "cpu")

    def place(self, policy: Any) -> None:
        """Move the policy to the rank's device; at stage 3 shard it, one layer after the other."""
        if self.sharding.shards_weights:
            import deepspeed

            settings = self.deepspeed_config(hidden_size_of(policy))
            layers = layers_of(policy)
            for module in [*layers, policy]:
                receive_weights(module, self.ranks)
                deepspeed.zero.Init(module=module, config_dict_or_path=settings)
            gather_as(policy.compute_dtype, layers)
        super().place(policy)

    def place_frozen(self, policy: Any) -> None:
        self.place(policy)
        if self.sharding.shards_weights:
            import deepspeed

            settings = self.deepspeed_config(hidden_size_of(policy))
            # Weights that stay gathered would not follow a moving reference.
            zero = settings["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
            zero.pop("offload_optimizer", None)
            deepspeed.initialize(model=policy, config=settings | {"zero_optimization": zero})
            gather_weights_read(policy)
            policy.eval()

    def prepare(self, policy: Any, optimizer: Any) -> nn.Module:
        """Return DeepSpeed's engine around the policy and its optimizer."""
        import deepspeed
        from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

        self.adamw: Any = optimizer
        settings = self.deepspeed_config(hidden_size_of(policy))
        offload = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
        if offload and settings.get("zero_force_ds_cpu_optimizer", True):
            # It has the same parameter groups, so the schedule sets both.
            self.adamw = map_pytorch_optim_to_deepspeed(optimizer)
        self.engine: Any = deepspeed.initialize(model=policy, optimizer=self.adamw, config=settings)[0]
        if self.sharding.shards_weights:
            gather_weights_read(policy)
        return self.engine

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Run one micro-batch's forward and backward inside. Stages 2 and 3 reduce its gradients to shards."""
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        # DeepSpeed averages over ranks. It drops gradients that are not finite, but ignores the loss. So a loss that is
        # not finite makes them NaN.
        factor = torch.where(loss.detach().isfinite(), float(self.ranks.world_size if is_share else 1), float("nan"))
        self.engine.backward(loss * factor, scale_wrt_gas=False)

    def reserve_update(self) -> None:
        """Do nothing: DeepSpeed creates the moments when its engine is built, or in its first update."""

    def update(self, loss_is_finite: bool) -> tuple[float, bool]:
        self.engine.step()
        return float(self.engine.get_global_grad_norm()), self.engine.was_step_applied()

    def clear_gradients(self) -> None:
        self.engine.optimizer.zero_grad()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        if not self.sharding.shards_weights:
            yield
            return
        import deepspeed

        offload: Any = self.engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            remove_hooks(offload)
            try:
                yield
            finally:
                offload._register_deepspeed_module(offload.module)

    @contextmanager
    def gathered_by_layer(self) -> Iterator[None]:
        offload: Any = self.engine.optimizer.parameter_offload
        offload.get_param_coordinator().reset_step()
        allow_reading(offload.module, True)
        try:
            yield
        finally:
            allow_reading(offload.module, False)
            offload.get_param_coordinator().reset_step()

    def optimizer_state(self, parameter: Any) -> dict[str, Tensor]:
        """Return a parameter's all-gathered optimizer state, or nothing before the first update."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.num_updates == 0:
            return {}
        self.link_states()
        moments: dict[str, Any] = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
        return {"step": torch.tensor(float(self.num_updates)), **moments}

    def load_optimizer_state(self, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
        """Load unsharded optimizer states; each rank keeps its part. All parameters get one step count."""
        if not any(states.values()):
            return
        self.make_states()
        for parameter, state in states.items():
            for name in MOMENTS:
                if name in state:
                    self.load_moment(parameter, name, state[name])
        steps = max(state["step"] for state in states.values() if state)
        for flat, state in self.adamw.state.items():
            if isinstance(self.adamw, torch.optim.AdamW):
                state["step"] = steps.to(flat.device, copy=True)  # where the fused kernel needs it
            else:
                state["step"] = int(steps)  # DeepSpeed's own Adam counts in Python

    def load_moment(self, parameter: Any, name: str, value: Tensor) -> None:
        """Load this rank's part of a moment, which every rank passes whole."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if not self.sharding.shards_weights:
            return safe_set_full_optimizer_state(parameter, value.to(self.ranks.device), name)
        part = rank_part(parameter, value, self.ranks.rank)
        padded = pad(part, (0, parameter.ds_tensor.numel() - len(part)))  # if the ranks do not divide the weight
        safe_set_local_optimizer_state(parameter, padded.to(self.ranks.device), name)

    @property
    def num_updates(self) -> int:
        return max((int(state["step"]) for state in self.adamw.state.values() if "step" in state), default=0)

    def make_states(self) -> None:
        """Create the moments, which DeepSpeed's optimizer would create in its first update."""
        optimizer = self.engine.optimizer
        groups = "fp32_partitioned_groups_flat" if self.sharding.shards_weights else "single_partition_of_fp32_groups"
        for flat in getattr(optimizer, groups):
            if not self.adamw.state.get(flat):
                moments = {name: torch.zeros_like(flat, requires_grad=False) for name in MOMENTS}
                self.adamw.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        self.link_states()

    def link_states(self) -> None:
        """Connect parameters with their moments. DeepSpeed 0.19.8 does so after its first group's first update."""
        if not self.sharding.shards_weights:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def import_deepspeed() -> None:
    """Import DeepSpeed. Raises LaunchError if it is missing or too old."""
    try:
        import deepspeed
        from packaging.version import Version
    except Exception as error:  # also those of DeepSpeed's own checks of the machine
        raise LaunchError(
            f"the launcher asks for DeepSpeed, which cannot be imported ({error}): pip install -e '.[deepspeed]'"
        ) from error
    if Version(deepspeed.__version__) < Version(OLDEST_VERSION):
        raise LaunchError(
            f"DeepSpeed {deepspeed.__version__} is too old, rl-vlm needs {OLDEST_VERSION} or newer: "
            "pip install --upgrade -e '.[deepspeed]'"
        )
    if Version(deepspeed.__version__) >= Version(FIRST_UNTESTED):
        logger.warning("DeepSpeed %s is newer than what rl-vlm is tested with, 0.19", deepspeed.__version__)
    if not torch.accelerator.is_available():
        # Compiling this operator takes minutes at the first start, and its lock outlives a killed job.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def hidden_size_of(policy: Any) -> int:
    return policy.transformer.config.get_text_config().hidden_size


def gather_as(dtype: torch.dtype, layers: Sequence[nn.Module]) -> None:
    """Let ranks gather the matrices of layers in a dtype. Ranks still hold them, and sum gradients, in float32.

    DeepSpeed's `torch_autocast` would also sum gradients in 16 bits.
    """
    from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME

    for parameter in {p for layer in layers for p in layer.parameters()}:
        if len(whole_shape(parameter)) > 1:
            setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def gather_weights_read(policy: Any) -> None:
    """Gather weights that a forward reads without calling their module, such as the LM head's or a position table.

    DeepSpeed's engine does so only in its own forwards, in training. The LM head's weight is gathered once per forward
    of the policy, because ranks have different numbers of token chunks.
    """
    import deepspeed

    deepspeed.zero.register_external_parameter(policy, policy.transformer.get_output_embeddings().weight)
    policy.register_forward_pre_hook(lambda *_: allow_reading(policy, True))
    policy.register_forward_hook(lambda *_: allow_reading(policy, False), always_call=True)


def allow_reading(module: nn.Module, allowed: bool) -> None:
    """Allow modules to gather a weight of another module before they read it, or forbid that."""
    for part in module.modules():
        parameters: Any = part._parameters  # DeepSpeed's own kind of dict
        parameters._in_forward = allowed


def remove_hooks(offload: Any) -> None:
    """Remove DeepSpeed's hooks, which would free weights after each module's forward."""
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
