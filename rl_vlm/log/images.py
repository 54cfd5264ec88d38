"""Small copies of the images of some prompts and their trajectories for the report, stored with the completions.

A video becomes a strip of some of its frames.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.data.video.shown import decode_medium
from rl_vlm.log.files import atomic_write
from rl_vlm.log.strips import HEIGHT, WIDTH, strip_of
from rl_vlm.log.trajectories import KeepImages
from rl_vlm.types import Sample, Video

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PROMPTS = 200
"""Approximate number of training prompts whose images are kept."""
MOST_HELD_OUT = 50
"""Approximate number of held-out prompts whose images are kept."""
MOST_PER_PROMPT = 4
MOST_COMPLETIONS = 2
"""Completions of a group whose observed images are kept, since each draw of a prompt has new ones."""
MOST_PER_COMPLETION = 16
LONG_SIDE = 448
"""Pixels of the long side of a copy."""
PIXELS_PER_COMPLETION = 4 * LONG_SIDE**2
"""Pixels of all copies of observed images of a completion. Small frames of a game fit all."""
QUALITY = 80


class PromptImages:
    """Writes the images and videos of some prompts as small JPEG files, each once. Any rank can write."""

    def __init__(
        self,
        folder: Path,
        num_prompts: int = 1,
        most: int = MOST_PROMPTS,
        most_per_prompt: int | None = MOST_PER_PROMPT,
        base: Path | None = None,
    ) -> None:
        """Keep the images of about `most` of `num_prompts` different prompts, and `most_per_prompt` of each.

        Columns have paths relative to `base`, by default the directory of the folder.
        """
        self.folder = folder
        self.share = most / max(1, num_prompts)
        self.most_per_prompt = most_per_prompt
        self.base = folder.parent if base is None else base

    def write(self, sample: Sample) -> dict[str, list[str]]:
        """Write the first images and videos of a prompt, and return the columns of their paths.

        Return no column if the hash of the sample's id is not in the share to keep, which is independent of ranks and
        of resuming. Leave out empty columns. If all images are kept, the column of images can be empty.
        """
        if not is_kept(sample.sample_id, self.share):
            return {}
        images = [self.write_image(image) for image in sample.own_images[: self.most_per_prompt]]
        strips = [self.write_image(strip_of(video)) for video in sample.all_videos[: self.most_per_prompt]]
        always = {"images": images} if self.most_per_prompt is None else {}
        return always | {name: paths for name, paths in (("images", images), ("videos", strips)) if paths}

    def of_completion(self, sample: Sample, index: int) -> KeepImages | None:
        """Return the function that writes the first images and clips of a tool's result and returns their paths.

        Return None if the images of the prompt are not kept, or if enough completions of the group come before.
        """
        if index >= MOST_COMPLETIONS or not is_kept(sample.sample_id, self.share):
            return None
        num = pixels = 0

        def keep(files: Sequence[bytes]) -> list[str]:
            nonlocal num, pixels
            names: list[str] = []
            for file in files:
                if num == MOST_PER_COMPLETION or pixels > PIXELS_PER_COMPLETION:
                    break
                medium = decode_medium(file)
                image = strip_of(medium) if isinstance(medium, Video) else medium
                num, pixels = num + 1, pixels + math.prod(copy_size(image))
                if pixels <= PIXELS_PER_COMPLETION:
                    names.append(self.write_image(image))
            return names

        return keep

    def write_image(self, image: Image) -> str:
        """Write a small copy of an image, unless it exists, and return its path from `base`.

        A strip is copied as it is.
        """
        path = self.folder / f"{image_digest(image)}.jpg"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as unfinished:
                small_copy(image).save(unfinished, format="JPEG", quality=QUALITY)
        return os.path.relpath(path, self.base)


def is_kept(sample_id: str, share: float) -> bool:
    """Return whether the hash of a sample's id falls in this share of all hashes."""
    return int(hashlib.sha256(sample_id.encode()).hexdigest()[:8], 16) < share * 2**32


def image_digest(image: Image) -> str:
    """Return a hash of the pixels."""
    return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()[:32]


def copy_size(image: Image) -> tuple[int, int]:
    """Return the width and height of the small copy of an image. A strip of frames is small already."""
    width, height = image.size
    is_strip = width <= WIDTH and height <= HEIGHT
    share = 1.0 if is_strip else min(1.0, LONG_SIDE / max(width, height))
    return max(1, round(width * share)), max(1, round(height * share))


def small_copy(image: Image) -> Image:
    """Return the image in RGB, in the size of a copy. The image itself is not changed."""
    size = copy_size(image)
    return (image if size == image.size else image.resize(size, reducing_gap=2.0)).convert("RGB")
