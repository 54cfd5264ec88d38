"""Readers of the values that `reset` and `step` return, in the forms of Gymnasium and of systems that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rewards.contract import Fault, read_score
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.errors import DataError
from rl_vlm.rollout.environments.contract import Content, Step, read_content, with_frames
from rl_vlm.rollout.environments.failures import ToolFailure

FORMS = "(content, reward, done, info) or (content, reward, terminated, truncated, info)"


def read_reset(value: Any, max_image_pixels: int) -> Content | None:
    """Read the value of `reset`: content, if any, or (content, info). Raises errors like `read_content`."""
    has_info = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)
    return read_shown(value[0] if has_info else value, max_image_pixels)


def read_shown(value: Any, max_image_pixels: int) -> Content | None:
    """Read content, or an image as Gymnasium renders it. There is none for None and for an empty list."""
    from PIL import Image

    if value is None or (isinstance(value, list) and not value):
        return None
    is_image = isinstance(value, np.ndarray | Image.Image)
    return read_content([{"type": "image", "image": value}] if is_image else value, max_image_pixels)


def read_step(value: Any, max_image_pixels: int) -> Step:
    """Read the value of `step`.

    Raises ToolFailure if it has neither form, or if the reward or the content cannot be read. The completion is a fault
    then, since the model cannot mend it.
    """
    match value:
        case (content, reward, done, dict()):
            truncated = False
        case (content, reward, done, truncated, dict()):
            pass
        case _:
            raise ToolFailure("step", f"`step` must return {FORMS}, not {type(value).__name__}")
    score = read_score(reward)
    if score is None or isinstance(score, Fault):
        problem = "None" if score is None else score.message
        raise ToolFailure("step", f"`step` has no reward that can be used: {problem}")
    with content_errors():
        end = "stop" if done else "turns" if truncated else None
        return Step(read_shown(content, max_image_pixels) or Content([]), score, end)


def step_with_frames(step: Step, rule: FrameRule) -> Step:
    """Return a step with the chosen frames of its clips. Raises ToolFailure if a clip cannot be decoded."""
    with content_errors():
        return step._replace(content=with_frames(step.content, rule))


@contextmanager
def content_errors() -> Iterator[None]:
    """Raise ToolFailure in place of an error of content in this context."""
    try:
        yield
    except (DataError, TypeError, ValueError) as error:
        raise ToolFailure("step", f"`step` returned what cannot be read: {error}") from error
