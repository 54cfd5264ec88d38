"""The size of frames: the limits of the settings on one frame, and the rule of each kind of video processor."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_vlm.errors import ConfigError

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig

LIMITS = ("video_min_pixels", "video_max_pixels", "video_total_pixels")
SHARE = 0.9
"""Qwen2-VL's processor leaves a tenth of `max_video_tokens` to the text."""
SLACK = 1.05
"""Qwen's processors keep the maximum of a frame this much above its minimum."""

OF_SQUARES = "get_resize_output_image_size"
"""The rule of a processor that makes squares of frames (SmolVLM)."""


class FrameLimits(NamedTuple):
    """Limits on the pixels of one frame."""

    least: float
    most: float


def frame_size(processor: Any, num_frames: int, width: int, height: int, data: DataConfig) -> tuple[int, int]:
    """Return width and height of the frames that the vision tower gets from a video with frames of this size.

    `processor` is the checkpoint's video processor, or None if frames are given as images. Frames of this size are not
    resized again. If the processor chooses tiles of a frame by itself, the frame keeps its size.
    """
    rule = own_function(processor, "smart_resize")
    if rule is not None:
        limits = frame_limits(processor, num_frames, data)
        return by_pixels(processor, rule, num_frames, (width, height), limits)
    if (size := own_size(processor, width, height)) is not None:
        return size
    return within(width, height, given_limits(num_frames, data))


def has_size(processor: Any, height: int, width: int) -> bool:
    """Return whether frames can have the size of `frame_size` already, so that they need not be resized again.

    The processor's own limits may be others than the settings', and would change the size.
    """
    return has_any_size(processor) and not (height % unit(processor) or width % unit(processor))


def has_any_size(processor: Any) -> bool:
    """Return whether a processor takes frames of any size that is a multiple of its unit. Others choose sizes."""
    return own_function(processor, "smart_resize") is not None


def smallest_frame(processor: Any) -> int | None:
    """Return the smallest `data.video_max_pixels` that makes a difference, or None if it makes none."""
    if has_any_size(processor):
        return unit(processor) ** 2
    return 1 if own_size(processor, 640, 360) is None else None


def check_limits(processor: Any, data: DataConfig) -> None:
    """Raise ConfigError if the settings limit pixels of frames, and the checkpoint's video processor has one size."""
    given = [name for name in LIMITS if getattr(data, name) is not None]
    if given and smallest_frame(processor) is None:
        kind = type(processor).__name__
        raise ConfigError(f"data.{given[0]} has no effect on the checkpoint's {kind}, which has one size; unset it.")


def frame_limits(processor: Any, num_frames: int, data: DataConfig) -> FrameLimits:
    """Return the limits of one frame. The settings replace the limits of the checkpoint.

    Qwen2-VL's processor limits one frame. The processors of Qwen3-VL and GLM limit all frames together. Both processors
    of Qwen also cap a frame so that long videos stay within `max_video_tokens`, as their authors do.
    """
    own = dict(processor.size)
    least, most, factor = own["shortest_edge"], own["longest_edge"], unit(processor)
    tokens = getattr(processor, "max_video_tokens", None)
    if counts_all_frames(processor):
        least, share = least / num_frames, most / num_frames
        most = max(min(tokens * factor**2, share), int(own["shortest_edge"] * SLACK)) if tokens else share
    elif tokens:
        share = int(tokens * factor**2 * SHARE) * processor.temporal_patch_size // num_frames
        most = max(min(most, share), int(least * SLACK))
    given = given_limits(num_frames, data)
    most = given.most if data.video_max_pixels or data.video_total_pixels else most
    return FrameLimits(min(given.least if data.video_min_pixels else least, most), most)


def given_limits(num_frames: int, data: DataConfig) -> FrameLimits:
    """Return the limits of one frame that the settings give."""
    share = (data.video_total_pixels or math.inf) / num_frames
    most = min(data.video_max_pixels or math.inf, share)
    return FrameLimits(min(data.video_min_pixels or 0, most), most)


def by_pixels(
    processor: Any, rule: Callable[..., tuple[int, int]], num_frames: int, size: tuple[int, int], limits: FrameLimits
) -> tuple[int, int]:
    """Return the size that the processor's own `smart_resize` gives within the limits."""
    joined = processor.temporal_patch_size
    count = -(-num_frames // joined) * joined if counts_all_frames(processor) else 1
    frames = {"num_frames": count, "temporal_factor": joined} if counts_all_frames(processor) else {}
    most = math.floor(limits.most * count)

    def resized(width: int, height: int, least: float) -> tuple[int, int]:
        new_height, new_width = rule(
            height=height, width=width, factor=unit(processor), min_pixels=math.ceil(least * count), max_pixels=most,
            **frames,
        )  # fmt: skip
        return new_width, new_height

    found = resized(*size, float(limits.least))
    is_above = found[0] * found[1] * count > most  # enlarged frames are rounded up, above a maximum that is near
    return resized(*within(*size, limits), 0.0) if is_above else found


def own_size(processor: Any, width: int, height: int) -> tuple[int, int] | None:
    """Return the size that a processor without limits on pixels gives, or None if it has no such rule."""
    if (rule := own_function(processor, "get_aspect_ratio_preserving_size")) is not None:
        side, pool = processor.patch_size, processor.pooling_kernel_size
        most = processor.max_soft_tokens * pool**2
        new_height, new_width = rule(
            height=height, width=width, patch_size=side, max_patches=most, pooling_kernel_size=pool
        )
        return new_width, new_height
    if (rule := own_function(processor, "navit_resize")) is not None:
        (new_height, new_width), _ = rule(
            height, width, patch_size=processor.patch_size, merge_kernel_size=processor.merge_size,
            max_patches=processor.max_patches, max_size_per_side=processor.size["max_height"],
        )  # fmt: skip
        return new_width, new_height
    size = dict(getattr(processor, "size", None) or {})
    if (rule := own_function(processor, OF_SQUARES)) is not None and "longest_edge" in size:
        import torch

        new_height, new_width = rule(torch.empty(height, width, device="meta"), size["longest_edge"])
        return new_width, new_height
    fixed = size.get("height"), size.get("width")
    return (fixed[1], fixed[0]) if fixed[0] and fixed[1] else None


def tower_pixels(processor: Any, width: int, height: int) -> int:
    """Return the number of pixels that the tower gets of a frame in the size of `frame_size`. Squares are padded."""
    if own_function(processor, OF_SQUARES) is None:
        return width * height
    return processor.max_image_size["longest_edge"] ** 2


def within(width: int, height: int, limits: FrameLimits) -> tuple[int, int]:
    """Return the size of the same shape within the limits."""
    pixels = width * height
    scale = math.sqrt(min(max(pixels, limits.least), limits.most) / pixels)
    return (width, height) if scale == 1 else (max(int(width * scale), 1), max(int(height * scale), 1))


def own_function(processor: Any, name: str) -> Callable[..., Any] | None:
    """Return a function of the module in which a processor's class is, or None."""
    return None if processor is None else getattr(sys.modules[type(processor).__module__], name, None)


def unit(processor: Any) -> int:
    """Return the side of the squares that a frame is made of: the patches that become one token."""
    return processor.patch_size * processor.merge_size


def counts_all_frames(processor: Any) -> bool:
    """Return whether the pixel limits of a processor count the pixels of all frames together."""
    rule = own_function(processor, "smart_resize")
    return rule is not None and "num_frames" in inspect.signature(rule).parameters


def resize(frame: np.ndarray, width: int, height: int, resample: int | None) -> np.ndarray:
    """Return a frame in another size, as video processors resize: antialiased, on 8 bits. `resample` is Pillow's."""
    if frame.shape[:2] == (height, width):
        return frame
    import torch
    from torchvision.transforms.v2 import functional
    from transformers.image_utils import pil_torch_interpolation_mapping

    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)
    mode = pil_torch_interpolation_mapping[3 if resample is None else resample]
    return functional.resize(pixels, [height, width], interpolation=mode, antialias=True).permute(1, 2, 0).numpy()
