"""Videos as images of a prompt or an observation, for models without an input for videos."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vlm.types import Sample, Video

ContentBlock = dict[str, Any]


def frames_as_images(sample: Sample) -> Sample:
    """Return the sample with each frame of its videos as an image, after its time.

    Example: the block of a video becomes the blocks "0.0 s: ", image, "0.5 s: ", image.
    """
    from PIL import Image

    if not sample.videos:
        return sample
    images, files = iter(sample.images), iter(sample.image_files or [None] * len(sample.images))
    videos, placed, encoded, starts = iter(sample.videos), [], {}, []
    numbers = iter(range(len(sample.images)))

    def shown(block: ContentBlock) -> list[ContentBlock]:
        if block["type"] == "image":
            if (number := next(numbers)) in sample.encoded_images:
                encoded[len(placed)] = sample.encoded_images[number]
            placed.append((next(images), next(files)))
        if block["type"] != "video":
            return [block]
        video = next(videos)
        starts.append(len(placed))
        placed.extend((Image.fromarray(frame), None) for frame in video.frames)
        return frame_blocks(video)

    messages = [
        message | {"content": list(chain.from_iterable(map(shown, message["content"])))} for message in sample.messages
    ]
    return replace(
        sample,
        messages=messages,
        images=[image for image, _ in placed],
        encoded_images=encoded,
        image_files=[file for _, file in placed],
        videos=[],
        frames_of=sample.videos,
        frame_starts=starts,
    )


def frame_blocks(video: Video) -> list[ContentBlock]:
    """Return the blocks of a video's frames, each after a text with its second."""
    texts = [{"type": "text", "text": f"{time:.1f} s: "} for time in video.times]
    return [block for text in texts for block in (text, {"type": "image"})]
