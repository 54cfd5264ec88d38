"""Loads a checkpoint as one plain model. An adapter is merged into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ModelError, shorten
from rl_vlm.model.loading import load_adapter, load_transformer
from rl_vlm.model.quantization import refuse_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_plain_model(checkpoint: Path, base: str | None, config: ModelConfig) -> PreTrainedModel:
    """Load a checkpoint in float32. If `base` is given, the checkpoint is an adapter and is merged into `base`.

    The base is never loaded in 4 bits. Raises ModelError if it cannot be loaded, or if the merged weights are not
    finite.
    """
    config = config.model_copy(update={"load_in_4bit": False})
    if base is None:
        return load_transformer(str(checkpoint), config)
    try:
        refuse_quantized(base, config)
        model = load_transformer(base, config)
    except OSError as error:
        raise ModelError(f"the base model {base} of {checkpoint} cannot be loaded: {shorten(error)}") from error
    try:
        return load_adapter(model, str(checkpoint)).merge_and_unload(safe_merge=True)
    except ValueError as error:  # from safe_merge
        raise ModelError(f"the adapter {checkpoint} cannot be merged into {base}: {shorten(error)}") from error
