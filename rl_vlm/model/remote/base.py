"""The accessors of transformers' models, for models whose own code lacks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as Own
else:
    Own = object


class OwnModel(Own):
    """Goes before the model's class of a checkpoint's code."""

    tower: ClassVar[str]
    """Path of the vision tower."""
    base_model_prefix = ""
    """The model is its own base model. The published value is often the language model, which sees no images."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not hasattr(self, "all_tied_weights_keys"):  # the code is older than transformers 5, which needs this call
            self.post_init()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the vision tower."""
        return self.get_submodule(self.tower)


class OwnModelOfParts(OwnModel):
    """A model whose language model is one of its parts, and a transformers model."""

    language: ClassVar[str]
    """Path of the language model."""

    @property
    def language_part(self) -> Any:
        return self.get_submodule(self.language)

    def get_input_embeddings(self) -> Any:
        return self.language_part.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.language_part.get_output_embeddings()

    def get_decoder(self) -> Any:
        return self.language_part.get_decoder()
