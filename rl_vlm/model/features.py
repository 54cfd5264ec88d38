"""Image features of one prompt, and features that the micro-batches of a cut group share.

If a group is cut, its micro-batches use the same features of a trained vision tower. They are computed once without
gradients and kept, autograd sums their gradients, and then the tower runs once more, forward and backward:

    tower without gradients ─► features ─► micro-batch 1 … k, forward and backward ─► sum of the features' gradients
    tower with gradients ─► the same features ─ backward from the sum ─► gradients of the tower

By the chain rule, the gradient is the same as from k runs of the tower with gradients. A group's sub-groups are
consecutive, so only features for the groups of one micro-batch are kept at a time: the token budget bounds them. The
same holds for images that stay in the next context of a completion, if a completion is cut between contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class ImageFeatures:
    """Output of the vision tower and its projector for one prompt's images."""

    embeddings: Float[Tensor, "*tiles tokens hidden"]
    """One vector per placeholder token, in order. Some families group them by tile."""
    deepstack: tuple[Float[Tensor, "tokens hidden"], ...]
    """Features that deeper language layers add at the placeholders (Qwen3-VL)."""
    indicators: Float[Tensor, "indicators hidden"] | None
    """Embeddings of the tokens around images, if the vision tower computes them (Ovis2)."""
    lists: tuple[bool, bool]
    """Whether the model's own call returns lists for embeddings, and for deepstack layers. Its forward joins them."""
    layers: tuple[int, ...] = ()
    """The language layers that add the embeddings and each of `deepstack`, if the model names them (Granite)."""
    num_image_tokens: int | None = None
    """How many vectors, or tiles of them, are images', the first ones. The others are videos'. None: all."""

    @property
    def of_images(self) -> ImageFeatures | None:
        """The vectors of images, if there are any."""
        num = self.num_image_tokens
        return self if num is None else self.map(lambda t: t[:num]) if num else None

    @property
    def of_videos(self) -> ImageFeatures | None:
        """The vectors of videos, if there are any."""
        num = self.num_image_tokens
        return None if num in (None, len(self.embeddings)) else self.map(lambda t: t[num:])

    def placed(self, is_video: Bool[Tensor, " placeholders"]) -> ImageFeatures:
        """Return the vectors in the order of their placeholders, as if all were of images."""
        order = torch.argsort(is_video.to(self.embeddings.device), stable=True)
        return replace(self.map(lambda t: torch.empty_like(t).index_copy(0, order, t)), num_image_tokens=None)

    def tensors(self) -> list[Tensor]:
        return [self.embeddings, *self.deepstack, *([] if self.indicators is None else [self.indicators])]

    def map(self, function: Callable[[Tensor], Tensor]) -> ImageFeatures:
        """Apply `function` to each tensor, in the order of `tensors`, and return the new features."""
        return replace(
            self,
            embeddings=function(self.embeddings),
            deepstack=tuple(function(layer) for layer in self.deepstack),
            indicators=None if self.indicators is None else function(self.indicators),
        )


class KeptFeatures:
    """Features of one prompt that several forwards use. Autograd sums their gradients, at least in float32."""

    def __init__(self, features: ImageFeatures) -> None:
        self.dtypes = [tensor.dtype for tensor in features.tensors()]
        self.leaves = features.map(lambda t: t.detach().to(torch.promote_types(t.dtype, torch.float32)))
        for leaf in self.leaves.tensors():
            leaf.requires_grad_()

    def features(self) -> ImageFeatures:
        """Return the features for one forward, in their original dtypes."""
        dtypes = iter(self.dtypes)
        return self.leaves.map(lambda leaf: leaf.to(next(dtypes)))

    def loss(self, features: ImageFeatures) -> Float[Tensor, ""]:
        """Return a scalar whose gradient at the recomputed `features` is the sum of the kept features' gradients."""
        pairs = zip(features.tensors(), self.leaves.tensors(), strict=True)
        products = [(tensor.to(leaf.dtype) * leaf.grad).sum() for tensor, leaf in pairs if leaf.grad is not None]
        return torch.stack(products).sum()
