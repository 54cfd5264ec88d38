"""Small copies of the images of some prompts and their trajectories for the report, stored with the completions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.data.images import decode_image
from rl_vlm.log.files import atomic_write
from rl_vlm.log.trajectories import KeepImages
from rl_vlm.types import Sample

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PROMPTS = 200
"""Approximate number of training prompts whose images are kept."""
MOST_HELD_OUT = 50
"""Approximate number of held-out prompts whose images are kept."""
MOST_PER_PROMPT = 4
MOST_COMPLETIONS = 2
"""Completions of a group whose observed images are kept, since each draw of a prompt has new ones."""
MOST_PER_COMPLETION = 4
LONG_SIDE = 448
"""Pixels of the long side of a copy."""
QUALITY = 80


class PromptImages:
    """Writes the images of some prompts as small JPEG files, each once. Any rank can write."""

    def __init__(self, folder: Path, num_prompts: int, most: int = MOST_PROMPTS) -> None:
        """Keep the images of about `most` of `num_prompts` different prompts."""
        self.folder = folder
        self.share = most / max(1, num_prompts)

    def write(self, sample: Sample) -> list[str] | None:
        """Write the first images of a prompt, and return their paths relative to the parent of `folder`.

        Return None if there are none, or if the hash of the sample's id is not in the share to keep. The hash makes the
        choice independent of ranks and of resuming.
        """
        if not sample.images or not is_kept(sample.sample_id, self.share):
            return None
        return [f"{self.folder.name}/{self.write_image(image).name}" for image in sample.images[:MOST_PER_PROMPT]]

    def of_completion(self, sample: Sample, index: int) -> KeepImages | None:
        """Return the function that writes the first images of a tool's result and returns their paths.

        Return None if the images of the prompt are not kept, or if enough completions of the group come before.
        """
        if index >= MOST_COMPLETIONS or not is_kept(sample.sample_id, self.share):
            return None
        left = iter(range(MOST_PER_COMPLETION))

        def keep(files: Sequence[bytes]) -> list[str]:
            chosen = [file for file, _ in zip(files, left, strict=False)]
            return [f"{self.folder.name}/{self.write_image(decode_image(file)).name}" for file in chosen]

        return keep

    def write_image(self, image: Image) -> Path:
        """Write an image, unless it exists, and return the path."""
        path = self.folder / f"{image_digest(image)}.jpg"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as unfinished:
                small_copy(image).save(unfinished, format="JPEG", quality=QUALITY)
        return path


def is_kept(sample_id: str, share: float) -> bool:
    """Return whether the hash of a sample's id falls in this share of all hashes."""
    return int(hashlib.sha256(sample_id.encode()).hexdigest()[:8], 16) < share * 2**32


def image_digest(image: Image) -> str:
    """Return a hash of the pixels."""
    return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()[:32]


def small_copy(image: Image) -> Image:
    """Return the image in RGB, with a long side of at most `LONG_SIDE` pixels. The image itself is not changed."""
    side = max(image.size)
    if side > LONG_SIDE:
        size = [max(1, round(length * LONG_SIDE / side)) for length in image.size]
        image = image.resize((size[0], size[1]), reducing_gap=2.0)
    return image.convert("RGB")
