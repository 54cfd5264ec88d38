"""The ways in which ranks hold a model, one row each. All other code reads facts about a sharding from its row.

A launcher asks for a kind of sharding. Its config selects a row of the kind, such as a stage of ZeRO. This module
imports no torch: a kind names its functions as `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Kind:
    """A kind of sharding that a launcher can ask for, and the facts that all its rows share."""

    name: str
    strategy: str
    """Function that builds the `Strategy`, called with the ranks and the settings of the run."""
    distributed_types: tuple[str, ...]
    """Values of `distributed_type` in a file for `accelerate launch`."""
    variable: str | None = None
    """Variable by which accelerate asks for this kind. None: the kind is accelerate's default."""
    launch: str = "rl_vlm.distributed.launch_variables:plain_launch"
    """Function that builds the `Launch` from the kind's name and the environment variables."""
    section: str | None = None
    """Section with the kind's options in a file for `accelerate launch`."""
    variable_of: Callable[[str], str] = str.upper
    """Returns the variable that accelerate sets for an option of the section."""
    sharding: str | None = None
    """Function that chooses the row of a `Launch`, without torch. None: the kind has one row."""
    check: str | None = None
    """Function that raises LaunchError if the kind's package is installed and cannot read the config of a `Launch`."""
    shards_state: bool = True
    """Ranks share the optimizer state, and each writes its part of a checkpoint."""
    needs_all_gradients: bool = False
    """Every micro-batch must give a gradient to the vision tower, even if it has no image."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How N ranks hold weights, gradients and optimizer state."""

    name: str
    kind: Kind
    shards_weights: bool = False
    """Each rank keeps a part of the weights. All must call every module equally often, since each call gathers them."""
    shards_gradients: bool = False
    """Each micro-batch's gradients are reduced to shards. ZeRO-1 adds up whole gradients on every rank, and reduces the
    sums after the last micro-batch."""
    copies: bool = False
    """DeepSpeed's optimizer updates a flat copy of the trained weights."""
    offloads_state: bool = False
    """Gradients, optimizer state and the copy of the weights are in host memory."""
    offloads_weights: bool = False
    """Weights are in host memory, and come to the device for each use."""
    keeps_gradients: bool = False
    """Gradients stay allocated from the first step on."""
    frees_layers: bool = False
    """A layer's gathered weights are freed after each use. DeepSpeed keeps as many as its config says."""
    casts_gathered: bool = False
    """Gathered layers are held in the compute precision. DeepSpeed sends them in it, and casts them back."""
    sums_in_update: bool = False
    """Whole gradients are summed over ranks in the update, through a bucket."""
    reduce_bucket: int | None = None
    """Values in DeepSpeed's buffer of gradients to send; by default the square of the model's width."""

    @property
    def shards_state(self) -> bool:
        """Whether ranks share the optimizer state."""
        return self.kind.shards_state

    @property
    def offloads(self) -> bool:
        """Whether state or weights are in host memory, which saves device memory on one rank too."""
        return self.offloads_state or self.offloads_weights

    def gathers(self, num_ranks: int) -> bool:
        """Return whether weights come to the device for each use, from other ranks or from host memory."""
        return self.offloads_weights or (self.shards_weights and num_ranks > 1)


def deepspeed_variable(option: str) -> str:
    """Return the variable that accelerate sets for an option of `deepspeed_config`."""
    return f"ACCELERATE_DEEPSPEED_{option.removeprefix('deepspeed_').upper()}"


PLAIN = Kind(
    "ddp",
    "rl_vlm.distributed.ddp:of_run",
    distributed_types=("NO", "MULTI_GPU", "MULTI_CPU"),
    shards_state=False,
)
DEEPSPEED = Kind(
    "deepspeed",
    "rl_vlm.distributed.zero:ZeRO",
    distributed_types=("DEEPSPEED",),
    variable="ACCELERATE_USE_DEEPSPEED",
    launch="rl_vlm.distributed.launch_variables:deepspeed_launch",
    section="deepspeed_config",
    variable_of=deepspeed_variable,
    sharding="rl_vlm.distributed.zero_config:launched_sharding",
    check="rl_vlm.distributed.zero_config:check_launched_keys",
    needs_all_gradients=True,
)
FSDP = Kind(
    "fsdp2",
    "rl_vlm.distributed.fsdp2:FSDP2",
    distributed_types=("FSDP",),
    variable="ACCELERATE_USE_FSDP",
    launch="rl_vlm.distributed.launch_variables:fsdp2_launch",
    section="fsdp_config",
)

UNSHARDED = Sharding(name="ddp", kind=PLAIN, sums_in_update=True)
ZERO1 = Sharding(name="zero1", kind=DEEPSPEED, copies=True)
ZERO2 = replace(ZERO1, name="zero2", shards_gradients=True)
FSDP2 = Sharding(
    name="fsdp2", kind=FSDP, shards_weights=True, shards_gradients=True, frees_layers=True, casts_gathered=True
)
ZERO3 = replace(ZERO2, name="zero3", shards_weights=True, keeps_gradients=True)

SHARDINGS: dict[str, Sharding] = {
    sharding.name: sharding
    for sharding in (
        UNSHARDED,
        ZERO1,
        replace(ZERO1, name="zero1_offload", offloads_state=True),
        ZERO2,
        replace(ZERO2, name="zero2_offload", offloads_state=True),
        FSDP2,
        ZERO3,
        replace(ZERO3, name="zero3_offload_optimizer", offloads_state=True),
        replace(ZERO3, name="zero3_offload_param", offloads_weights=True),
        replace(ZERO3, name="zero3_offload", offloads_state=True, offloads_weights=True),
    )
}
"""By name in `--sharding`. If several take equal time, `rl-vlm plan --suggest` shows them in this order."""


def kinds() -> dict[str, Kind]:
    """Return the kinds of the table by name, in its order."""
    return {sharding.kind.name: sharding.kind for sharding in SHARDINGS.values()}


def listed_names(holds: Callable[[Sharding], bool] = lambda sharding: True) -> list[str]:
    """Return the names of shardings for which `holds` is true, grouped by kind, for options."""
    found = [sharding for sharding in SHARDINGS.values() if holds(sharding)]
    return [sharding.name for sharding in sorted(found, key=lambda sharding: sharding.kind.name)]
