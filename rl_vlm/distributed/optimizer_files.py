"""The optimizer state in a checkpoint: unsharded tensors by the names of the weights, in one or more files.

optimizer/state-00001-of-00002.safetensors     model.layers.0.mlp.up_proj.weight/exp_avg, …/exp_avg_sq, …/step

Each rank of a sharded run writes one file. Any strategy on any number of ranks can load them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import whole_shape
from rl_vlm.errors import CheckpointError

FOLDER = "optimizer"  # a separate folder, since loaders of models may read every tensor file in theirs


class OptimizerFiles:
    """A copy of the optimizer's state at the time of construction."""

    def __init__(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Copy this rank's share of the state to host memory. All ranks must call this together."""
        num_files = ranks.world_size if optimizer.strategy.is_sharded else 1
        self.name = f"state-{ranks.rank + 1:05d}-of-{num_files:05d}.safetensors"
        self.is_written = ranks.rank < num_files
        self.tensors: dict[str, Tensor] = {}
        writers = choose_writers([whole_shape(p).numel() for p in optimizer.trainable.values()], num_files)
        for writer, (name, parameter) in zip(writers, optimizer.trainable.items(), strict=True):
            state = optimizer.strategy.optimizer_state(parameter)
            if writer == ranks.rank:
                copies = {key: value.to("cpu", copy=True).contiguous() for key, value in state.items()}
                self.tensors |= {f"{name}/{key}": copy for key, copy in copies.items()}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors that this rank writes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, directory: Path) -> None:
        """Write this rank's share to a directory, without communication."""
        if self.is_written:
            (directory / FOLDER).mkdir(exist_ok=True)
            save_file(self.tensors, directory / FOLDER / self.name)


def choose_writers(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Choose the rank that writes each parameter's state: the rank with the smallest share so far."""
    shares = [0] * num_ranks
    writers = []
    for size in sizes:
        writer = shares.index(min(shares))
        shares[writer] += size
        writers.append(writer)
    return writers


def load_optimizer(optimizer: Optimizer, directory: Path) -> None:
    """Load the state that `OptimizerFiles` wrote. Raise CheckpointError if it does not match the trained weights."""
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path in sorted((directory / FOLDER).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in sorted(file.keys()):
                name, _, part = key.rpartition("/")
                states[name][part] = file.get_tensor(key)
    if unknown := states.keys() - optimizer.trainable.keys():
        raise CheckpointError(
            f"{directory} has optimizer states of {len(unknown)} weights that this run does not train, such as "
            f"{min(unknown)}. Train the weights of the run that wrote it"
        )
    if states and (missing := optimizer.trainable.keys() - states.keys()):
        raise CheckpointError(
            f"{directory} has no optimizer state of {len(missing)} weights that this run trains, such as "
            f"{min(missing)}. Train the weights of the run that wrote it"
        )
    loaded: dict[nn.Parameter, dict[str, Tensor]] = {p: states[name] for name, p in optimizer.trainable.items()}
    optimizer.strategy.load_optimizer_state(loaded)
