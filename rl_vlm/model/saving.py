"""Writes the files of a model in a checkpoint, in the format of `from_pretrained`.

an adapter  copied to host memory (all ranks gather shards); the main process writes it
a model     copied likewise, block after block; if ranks hold shards, each writes some files of the checkpoint
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
from rl_vlm.model.remote.code import save_code

if TYPE_CHECKING:
    from transformers import ProcessorMixin

MAX_FILE_BYTES = 5 * 10**9
"""Bytes at which a file of a sharded checkpoint ends and the next begins."""
INDEX = "model.safetensors.index.json"


class PolicyFiles:
    """A snapshot of the model or the trained adapter, and its processor, to be written to files."""

    def __init__(self, policy: Policy, processor: ProcessorMixin, ranks: Ranks, in_parts: bool = False) -> None:
        """Copy this rank's share of the weights to host memory. All ranks must call this together.

        With `in_parts` every rank writes some files of a model. Otherwise the main process has the whole model and
        writes all files.
        """
        self.policy = policy
        self.processor = processor
        self.ranks = ranks
        self.adapter: dict[str, Tensor] | None = None
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """The tensors of each model file that this rank writes."""
        if policy.model is not policy.transformer:
            self.adapter = adapter_weights(policy)
            return
        if in_parts or ranks.is_main:
            self.tensors = model_files(policy, ranks.rank, ranks.world_size if in_parts else 1)
        self.file_of = {
            name: file
            for files in ranks.gather([{file: list(named) for file, named in self.tensors.items()}])
            for file, names in files.items()
            for name in names
        }
        self.num_bytes_of_model = int(ranks.sum([float(self.num_bytes)])[0])

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors that this rank writes, in bytes."""
        adapter = self.adapter if self.adapter and self.ranks.is_main else {}
        return sum(tensor.nbytes for named in (adapter, *self.tensors.values()) for tensor in named.values())

    def write(self, directory: Path) -> None:
        """Write this rank's share to a directory, without communication."""
        directory.mkdir(exist_ok=True)
        for file, tensors in self.tensors.items():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        if not self.ranks.is_main:
            return
        if self.adapter is None:
            self.write_configs(directory)
        else:
            model: Any = self.policy.model
            model.save_pretrained(
                directory, selected_adapters=["default"], state_dict=self.adapter, save_embedding_layers=False
            )
        self.processor.save_pretrained(directory)

    def write_configs(self, directory: Path) -> None:
        """Write the files of `save_pretrained` other than tensors: configs and the index."""
        model = self.policy.transformer
        save_code(model, directory)
        model.config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
        if len(set(self.file_of.values())) > 1:
            index = {
                "metadata": {"total_size": self.num_bytes_of_model},
                "weight_map": dict(sorted(self.file_of.items())),
            }
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def adapter_weights(policy: Policy) -> dict[str, Tensor]:
    """Return the trained adapter's weights by name, in host memory. All ranks must call this together."""
    trained = ((name, p) for name, p in policy.model.named_parameters() if p.requires_grad)
    return {name: whole(parameter).to("cpu", copy=True) for name, parameter in trained}


def model_files(policy: Policy, writer: int, num_writers: int) -> dict[str, dict[str, Tensor]]:
    """Return the model files that one of `num_writers` ranks writes, with their tensors in host memory.

    If ranks hold shards, all gather one weight after the other. File i goes to rank i modulo `num_writers`. The ranks
    get about equally many bytes, since a file ends with the block that reaches its size.
    """
    model: Any = policy.transformer
    blocks = [*by_block(untied([*model.named_parameters(), *persistent_buffers(model)]))]
    share = sum(map(num_bytes, blocks)) / num_writers
    files = split_into_files(blocks, share / math.ceil(share / MAX_FILE_BYTES))
    kept: dict[str, dict[str, Tensor]] = {}
    for i, blocks in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        is_mine = i % num_writers == writer
        if is_mine:
            kept[name] = {}
        for block in blocks:
            gathered: dict[str, Tensor] = {}
            for weight_name, weight in block:
                tensor = whole(weight)  # all ranks gather it
                if is_mine:
                    gathered[weight_name] = tensor.to("cpu", copy=True)
            if is_mine:
                kept[name] |= {n: t.contiguous() for n, t in as_in_checkpoints(model, gathered).items()}
    return kept


def split_into_files(blocks: Iterable[NamedWeights], max_bytes: float) -> list[list[NamedWeights]]:
    """Split blocks into files. The block that reaches `max_bytes` ends a file. All ranks get the same split."""
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
    """Return the size of a block's unsharded weights, in bytes."""
    return sum(whole_shape(weight).numel() * weight.element_size() for _, weight in block)
