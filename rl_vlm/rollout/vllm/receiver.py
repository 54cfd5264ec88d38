"""vLLM's side of a weight transfer: loads weights from files, or from the trainer in the same process.

The engine has the name `rl_vlm` in vLLM's weight-transfer API. `register` is a plugin of the entry-point group
`vllm.general_plugins`, so that vLLM knows the engine in each of its processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rl_vlm.log.terminal import drop_known_lines
from rl_vlm.rollout.vllm.arguments import read_weights
from rl_vlm.rollout.vllm.videos import LOADER, SentVideos

BACKEND = "rl_vlm"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty, since there is no connection to set up."""


@dataclass
class WeightFiles(WeightTransferUpdateInfo):
    """The location of the weights."""

    directory: str | None = None
    """A folder of safetensors files. If None, the weights are `WeightReceiver.handed_over`."""


class WeightReceiver(WeightTransferEngine[NoInitInfo, WeightFiles]):
    """Loads weights with the model's own `load_weights`, layer by layer, so that layers are packed as at start-up."""

    init_info_cls = NoInitInfo
    update_info_cls = WeightFiles
    handed_over: ClassVar[Iterable[tuple[str, Tensor]]] = ()
    """Weights from a trainer in this process."""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: WeightFiles) -> None:
        source = self.handed_over if update_info.directory is None else read_weights(Path(update_info.directory))
        model: Any = self.model
        model.load_weights(source)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: no resources are held."""


def register() -> None:
    """Register the engine and the loader of videos with vLLM, which calls this in each of its processes."""
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    drop_known_lines()
    VIDEO_LOADER_REGISTRY.register(LOADER)(SentVideos)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
