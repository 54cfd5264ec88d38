"""The start of a completion: the arguments of `reset`, and the prompt with its result."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rl_vlm.rollout.environments.contract import Content
from rl_vlm.types import RolloutRequest


def offered(request: RolloutRequest, seed: int) -> dict[str, Any]:
    """Return the arguments that `reset` can name: columns of the row, its prompt and images, their sizes, and a seed.

    Frames of videos are no images of the row, in whichever form the model gets them.

    The seed is the same for all completions of a group.
    """
    sample = request.prompt.sample
    images = sample.own_images
    digest = hashlib.blake2b(f"{seed}/{request.group_id}/reset".encode(), digest_size=4).digest()
    return {
        "seed": int.from_bytes(digest, "little"),
        "image_sizes": [image.size for image in images],
        "model_image_sizes": request.prompt.own_image_sizes,
        "images": images,
        "image": images[0] if len(images) == 1 else None,
        "prompt": sample.prompt,
        **sample.columns,
    }


def own_copy(value: Any) -> Any:
    """Return a copy for one environment, which may draw into images and change lists. Siblings have others."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.copy()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    return [own_copy(item) for item in value] if isinstance(value, list) else copy.copy(value)


def digest_of(content: Content) -> str:
    """Return a digest of content with its images and clips."""
    digest = hashlib.blake2b(json.dumps(content.blocks).encode(), digest_size=16)
    for image in content.images:
        digest.update(hashlib.blake2b(image, digest_size=16).digest())
    return digest.hexdigest()


def digests_of(contents: Sequence[Content | None]) -> tuple[str | None, ...]:
    """Return the digest of each content, None without content."""
    return tuple(None if content is None else digest_of(content) for content in contents)
