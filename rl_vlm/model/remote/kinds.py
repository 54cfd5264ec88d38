"""Models whose code comes with the checkpoint and does not take images as transformers' own models do.

An adapter is a class that goes before the code's class. It gives the model the accessors of transformers' models, and a
forward that takes `input_ids` with the inputs of images. It calls the code's own functions for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_vlm.model.remote import cogvlm, internvl, minicpmv

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class OwnKind:
    """How the models of one class are reached."""

    image_token: str | None
    """The token that takes the place of image features. None: the code's own function says it."""
    before: type
    """The class before the code's class."""
    complete: Callable[[PreTrainedConfig], None]
    """Adds the names of transformers' configs to a config."""

    def adapted(self, own: type) -> Any:
        """Return the code's class with the adapter. Its name and module stay, which new checkpoints name."""
        from transformers import GenerationMixin

        bases = (self.before, own) if issubclass(own, GenerationMixin) else (self.before, own, GenerationMixin)
        return type(own.__name__, bases, {"__module__": own.__module__})


OWN_KINDS = {
    "InternVLChatModel": OwnKind(internvl.IMAGE_TOKEN, internvl.InternVLChat, internvl.complete),
    "MiniCPMV": OwnKind(minicpmv.IMAGE_TOKEN, minicpmv.MiniCPMV, minicpmv.complete),
    "CogVLMForCausalLM": OwnKind(None, cogvlm.CogVLM, cogvlm.complete),
}
"""Adapters by the name of the published class, since CogVLM has no `model_type`. They are written from published
signatures, and none has run on a real checkpoint."""
