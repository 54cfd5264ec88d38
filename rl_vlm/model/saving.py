"""The files of a model in a checkpoint, in the format of `from_pretrained`.

whole       `save_pretrained`, on the main process
in parts    an adapter: gathered by all ranks, written by the main process
            a model: each rank gathers and writes some blocks, as files of one checkpoint
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import whole, whole_shape
from rl_vlm.model.blocks import NamedWeights, as_in_checkpoints, by_block, persistent_buffers, untied
from rl_vlm.model.policy import Policy

if TYPE_CHECKING:
    from transformers import ProcessorMixin

MAX_FILE_BYTES = 5 * 10**9
"""Size from which on a file of a sharded checkpoint gets no further block."""
INDEX = "model.safetensors.index.json"


class PolicyFiles:
    """The model, or only the trained adapter, with its processor. Shards are gathered when this is made."""

    def __init__(self, policy: Policy, processor: ProcessorMixin, ranks: Ranks, in_parts: bool = False) -> None:
        """Gather this rank's share of the files in host memory. All ranks must call this together.

        With `in_parts` every rank writes some files of a model. Otherwise the main process, which has it whole, does.
        """
        self.policy = policy
        self.processor = processor
        self.ranks = ranks
        self.in_parts = in_parts
        self.adapter: dict[str, Tensor] | None = None
        """The weights of an adapter, if they had to be gathered."""
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """The tensors of each file of a sharded model that this rank writes."""
        if not in_parts:
            return
        if policy.model is not policy.transformer:
            self.adapter = gathered_adapter(policy)
            return
        self.tensors = gathered_files(policy, ranks)
        self.file_of = {
            name: file
            for files in ranks.gather([{file: list(named) for file, named in self.tensors.items()}])
            for file, names in files.items()
            for name in names
        }
        self.num_bytes = int(ranks.sum([sum(t.nbytes for named in self.tensors.values() for t in named.values())])[0])

    def write(self, directory: Path) -> None:
        """Write this rank's share to a directory, without communication."""
        directory.mkdir(exist_ok=True)
        for file, tensors in self.tensors.items():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        if not self.ranks.is_main:
            return
        model: Any = self.policy.model
        if model is not self.policy.transformer:
            model.save_pretrained(
                directory, selected_adapters=["default"], state_dict=self.adapter, save_embedding_layers=False
            )
        elif self.in_parts:
            self.write_configs(directory)
        else:
            model.save_pretrained(directory)
        self.processor.save_pretrained(directory)

    def write_configs(self, directory: Path) -> None:
        """Write what `save_pretrained` writes beside a sharded model's tensors."""
        model = self.policy.transformer
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        if len(set(self.file_of.values())) > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(self.file_of.items()))}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def gathered_adapter(policy: Policy) -> dict[str, Tensor]:
    """Return the trained adapter's weights by name, gathered in host memory."""
    trained = ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)
    return {name: whole(parameter).cpu() for name, parameter in trained}


def gathered_files(policy: Policy, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Return the files of a sharded model that this rank writes, with their tensors in host memory.

    All ranks gather one weight after the other, and file i is kept by rank i modulo the number of ranks. Each rank
    gets about as many bytes, since a file ends with the block that reaches its size.
    """
    model: Any = policy.transformer
    blocks = [*by_block(untied([*model.named_parameters(), *persistent_buffers(model)]))]
    share = sum(map(num_bytes, blocks)) / ranks.world_size
    files = split_into_files(blocks, share / math.ceil(share / MAX_FILE_BYTES))
    kept: dict[str, dict[str, Tensor]] = {}
    for i, blocks in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        is_mine = i % ranks.world_size == ranks.rank
        if is_mine:
            kept[name] = {}
        for block in blocks:
            gathered: dict[str, Tensor] = {}
            for weight_name, weight in block:
                tensor = whole(weight)  # by all ranks
                if is_mine:
                    gathered[weight_name] = tensor.cpu()
            if is_mine:
                kept[name] |= {n: t.contiguous() for n, t in as_in_checkpoints(model, gathered).items()}
    return kept


def split_into_files(blocks: Iterable[NamedWeights], max_bytes: float) -> list[list[NamedWeights]]:
    """Split blocks into files that end with the block that reaches `max_bytes`; equal on all ranks."""
    files: list[list[NamedWeights]] = []
    size = max_bytes
    for block in blocks:
        if size >= max_bytes:
            files.append([])
            size = 0
        files[-1].append(block)
        size += num_bytes(block)
    return files


def num_bytes(block: NamedWeights) -> int:
    """Return the bytes of a block's unsharded weights."""
    return sum(whole_shape(weight).numel() * weight.element_size() for _, weight in block)
