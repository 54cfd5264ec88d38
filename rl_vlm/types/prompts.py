"""Rows of a dataset, and prompts made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from rl_vlm.types.media import MediumRead, Video

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
VideoFormat = Literal["native", "frames"]
"""Form of a video: the model's own input for videos (native), or its frames as images."""


@dataclass(frozen=True)
class Sample:
    """One dataset row."""

    sample_id: str
    messages: list[dict[str, Any]]
    """Chat messages; `{"type": "image"}` blocks stand for `images`, in order."""
    images: list[Image]
    columns: dict[str, Any]
    """All other columns of the row, as reward functions receive them."""
    prompt: Any
    """The prompt as reward functions receive it: messages, or the text of a plain-text row."""
    encoded_images: dict[int, bytes] = field(default_factory=dict)
    """The row's own PNG, JPEG or WEBP files by index in `images`, if they decode to these pixels. They are sent to
    servers unchanged; other images are sent as PNG."""
    image_files: list[str | None] = field(default_factory=list)
    """Path of each image, or None for an image that is not a file."""
    videos: list[Video] = field(default_factory=list)
    """`{"type": "video"}` blocks of `messages` stand for them, in order."""
    frames_of: list[Video] = field(default_factory=list)
    """Videos whose frames are among `images`, in order. They have no blocks of their own."""
    frame_starts: list[int] = field(default_factory=list)
    """Index in `images` of the first frame of each of `frames_of`."""

    @property
    def all_videos(self) -> list[Video]:
        """Its videos, in whichever form the model gets them."""
        return [*self.videos, *self.frames_of]

    @property
    def own_images(self) -> list[Image]:
        """The row's images, without frames of videos."""
        return self.without_frames(self.images)

    def without_frames(self, values: Sequence[T]) -> list[T]:
        """Leave out the values of video frames, from one value per image or from none."""
        pairs = zip(self.frame_starts, self.frames_of, strict=True)
        frames = {start + i for start, video in pairs for i in range(len(video.frames))}
        return [value for i, value in enumerate(values) if i not in frames]

    @cached_property
    def reads(self) -> list[MediumRead]:
        """The pixels that were read for the prompt. A resumed run compares them with the pixels that it reads."""
        files = self.image_files or [None] * len(self.images)
        images = [MediumRead.of_image(image, path) for image, path in zip(self.images, files, strict=True)]
        return images + [MediumRead.of_video(video) for video in self.all_videos]

    @property
    def media_text(self) -> str:
        """Description of its images and videos in errors, such as "images of 64x48 pixels". Empty without images and
        videos."""
        images = ", ".join(f"{image.width}x{image.height}" for image in self.own_images)
        shapes = [video.frames.shape for video in self.all_videos]
        videos = ", ".join(f"{number} frames of {width}x{height}" for number, height, width, _ in shapes)
        named = [f"images of {images} pixels"] if images else []
        return " and ".join([*named, *([f"videos of {videos} pixels"] if videos else [])])


@dataclass(frozen=True, eq=False)
class Prompt:
    """A sample rendered for one model, together with its image inputs.

    Prompts are compared by identity, since equal token ids may stand for different images.
    """

    sample: Sample
    token_ids: Int[Tensor, " prompt_tokens"]
    """Prompt tokens with every image already expanded to its placeholder tokens."""
    token_inputs: dict[str, Tensor]
    """The processor's other per-token inputs, each of shape (prompt_tokens,), such as `mm_token_type_ids`."""
    mm_inputs: dict[str, Tensor]
    """The processor's inputs of images and videos under the model's names (`pixel_values`, `image_grid_thw`,
    `pixel_values_videos`); empty for text."""
    image_sizes: list[tuple[int, int]] | None = None
    """Width and height of each image in pixels, after the processor's resizing. None if the processor makes tiles, or
    is not known (endpoints)."""

    @property
    def name(self) -> str:
        """Return its name in errors."""
        return f"sample {self.sample.sample_id}"

    @property
    def num_images(self) -> int:
        return len(self.sample.images)

    @property
    def own_image_sizes(self) -> list[tuple[int, int]] | None:
        """`image_sizes` without frames of videos."""
        return None if self.image_sizes is None else self.sample.without_frames(self.image_sizes)

    @cached_property
    def digest(self) -> bytes:
        """A hash of its images, as the processor made them. Equal images share features."""
        return digest_of(self.mm_inputs)


def digest_of(mm_inputs: dict[str, Tensor]) -> bytes:
    """Hash the inputs of images. A tensor without values, as in traces of memory, equals only itself."""
    found = blake2b(digest_size=16)
    for name, tensor in sorted(mm_inputs.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {id(tensor) if tensor.is_meta else ''}".encode())
        if not tensor.is_meta:
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()
