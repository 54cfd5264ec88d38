"""Images and videos in one input of the model, for processors that write videos over a prompt's images (SmolVLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from torch import Tensor

    from rl_vlm.types import Video


def has_one_input(processor: Any) -> bool:
    """Return whether a processor returns pixels of videos under the name of image pixels."""
    video_processor = getattr(processor, "video_processor", None)
    return video_processor is not None and "pixel_values" in video_processor.model_input_names


def expanded(
    processor: Any, text: str, images: Sequence[Image], videos: Sequence[Video]
) -> tuple[str, dict[str, Tensor]]:
    """Return a text with the processor's own text in place of each image and video, and the inputs of both.

    Each image and each video is processed alone, as one prompt. The inputs are in the order of the text.
    """
    import torch

    form: dict[str, Any] = {"do_sample_frames": False, "return_metadata": True, "return_tensors": "pt"}
    parts = {
        "image": [
            processor.image_processor([[image]], return_row_col_info=True, return_tensors="pt") for image in images
        ],
        "video": [
            processor.video_processor([video.frames], video_metadata=[video.metadata], **form) for video in videos
        ],
    }
    texts = [
        [processor.replace_image_token(each, 0) for each in parts["image"]],
        [processor.replace_video_token(each, 0) for each in parts["video"]],
    ]
    (text,), (places,) = processor.get_text_with_replacements([text], *texts)
    in_turn = {kind: iter(some) for kind, some in parts.items()}
    found = [next(in_turn[place["type"]]) for place in places]
    names = processor.image_processor.model_input_names
    return text, {name: torch.cat([part[name] for part in found], dim=1) for name in names}
