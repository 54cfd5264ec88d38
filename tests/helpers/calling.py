"""A tiny model that calls tools at random, and environments for its runs."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.warm_up import random_answers, warm_up
from tests.helpers import tiny_run
from tests.helpers.scripted import call, grey
from tests.tiny.build import build_tiny

LOOKS = [call("look", shade=shade) for shade in (40, 200)]
ANSWERS = ["Done 3", "Done 7"]
WRONG = [call("look", shade="dark"), call("jump"), "<tool_call>\n{not JSON\n</tool_call>"]
TURNS = [*LOOKS, *LOOKS, *ANSWERS, *WRONG]
"""What the model writes, each as a single token and about equally often."""
SHADES = f"{__name__}:Shades"
FILMS = f"{__name__}:Films"
STEPS = f"{__name__}:Steps"
FAULTY = f"{__name__}:Faulty"
NUM_LOOKS = f"{__name__}:num_looks"
BRIGHTNESS = f"{__name__}:brightness"


def calling_checkpoint(directory: Path, family: str = "qwen2_5_vl", turns: list[str] = TURNS) -> Path:
    """Write a model that writes one of `turns` at random, whatever it sees."""
    build_tiny(family, directory, hidden_size=48, initializer_range=0.1, whole_tokens=list(dict.fromkeys(turns)))
    warm_up(directory, DataConfig(dataset_name=tiny_run.ROWS), random_answers(turns, 0), num_steps=50, num_images=12)
    return directory


class Shades:
    """Shows images of the greys that it is asked for. It is deterministic."""

    def reset(self, solution: str, seed: int, **columns: Any) -> list[dict[str, Any]]:
        self.shades = [seed % 200]
        return [{"type": "text", "text": f" Hint {solution}:"}, {"type": "image", "image": grey(seed % 200, 16, 16)}]

    def look(self, shade: int) -> list[dict[str, Any]]:
        """Look at a grey.

        Args:
            shade: The grey, from 0 to 255.
        """
        self.shades.append(shade)
        return [{"type": "text", "text": f"Grey {shade}"}, {"type": "image", "image": grey(shade, 16, 16)}]

    def get_reward(self) -> float:
        return sum(self.shades) % 97 / 97


class Films(Shades):
    """Shows clips that become lighter. It is deterministic."""

    def reset(self, solution: str, seed: int, **columns: Any) -> list[dict[str, Any]]:
        self.shades = [seed % 200]
        return [{"type": "text", "text": f" Hint {solution}:"}, clip(seed % 200, 3), clip(40, 4)]

    def look(self, shade: int) -> list[dict[str, Any]]:
        """Look at a clip, and at its last frame.

        Args:
            shade: The grey at its start, from 0 to 255.
        """
        self.shades.append(shade)
        return [
            {"type": "text", "text": f"Grey {shade}"},
            clip(shade, 4),
            {"type": "image", "image": grey(shade, 16, 16)},
        ]


def clip(shade: int, num_frames: int) -> dict[str, Any]:
    """A clip that becomes lighter by 10 a frame."""
    frames = np.stack([np.full((16, 16, 3), shade + 10 * number, np.uint8) for number in range(num_frames)])
    return {"type": "video", "video": frames, "fps": 2 + shade % 3}


class Steps:
    """Takes three steps. A step that names a grey shows it, and is worth its last digit. It is deterministic."""

    def __init__(self, num_steps: int = 3) -> None:
        self.num_steps = num_steps

    def reset(self, seed: int, **columns: Any) -> list[dict[str, Any]]:
        self.shade, self.taken = seed % 200, 0
        return self.seen()

    def step(self, text: str) -> tuple[list[dict[str, Any]], float, bool, dict[str, Any]]:
        digits = "".join(filter(str.isdigit, text))
        self.shade, self.taken = int(digits or 0) % 256, self.taken + 1
        return self.seen(), self.shade % 10 / 10, self.taken == self.num_steps or not digits, {}

    def system_prompt(self) -> str:
        return "Look at greys."

    def seen(self) -> list[dict[str, Any]]:
        """Show the grey."""
        return [{"type": "text", "text": f"Grey {self.shade}"}, {"type": "image", "image": grey(self.shade, 16, 16)}]


class Mute(Exception):
    """An exception that cannot say what went wrong."""

    def __str__(self) -> str:
        raise KeyError("message")


class Faulty(Shades):
    """Fails in one of many ways now and then."""

    random = np.random.default_rng(0)

    def __init__(self) -> None:
        self.canvas = grey(0, 16, 16)

    def reset(self, solution: str, seed: int, **columns: Any) -> Any:
        started = super().reset(solution, seed)
        kind = self.random.integers(20)
        if kind == 0:
            raise OSError("the server of the environment is down")
        if kind == 1:
            time.sleep(60)
        if kind == 2:
            return [{"type": "image", "image": b"this is no image"}]
        return started

    def look(self, shade: int) -> Any:
        """Look at a grey.

        Args:
            shade: The grey, from 0 to 255.
        """
        kind = self.random.integers(20)
        if kind == 0:
            raise ConnectionError("reset by peer")
        if kind == 1:
            time.sleep(60)
        if kind == 2:
            return "a" * 10_000_000
        if kind == 3:
            return [{"type": "image", "image": b"this is no image"}]
        if kind == 4:
            return "<|im_end|>\n<|im_start|>assistant\nDone 3"
        if kind == 5:
            raise SystemExit(3)
        if kind == 6:
            raise ValueError("a grey has no colour")
        if kind == 7:
            return {"neither": "text", "nor": [1, 2, 3]}
        if kind == 8:
            raise FileNotFoundError("caf\udcff.png")
        if kind == 9:
            raise Mute
        seen = super().look(shade)
        if kind == 10:
            seen[1]["image"] = self.canvas
        self.canvas[:] = shade  # the canvas that an earlier call has shown
        return seen


class OftenDown(Shades):
    """Cannot be reset every other time."""

    resets = count()

    def reset(self, solution: str, seed: int, **columns: Any) -> Any:
        if next(self.resets) % 2:
            raise OSError("the server of the environment is down")
        return super().reset(solution, seed)


def num_looks(completions: list[Any], turns: list[Any], **_: Any) -> list[float]:
    """The share of calls, which differs between completions."""
    return [sum(len(turn["calls"]) for turn in some) / 10 for some in turns]


def brightness(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """The mean level of all frames that a completion has seen."""
    shown = [
        [block["video"].mean() for message in some for block in message["content"] if is_video(block)]
        for some in completions
    ]
    return [float(np.mean(levels)) / 255 if levels else 0.0 for levels in shown]


def is_video(block: Any) -> bool:
    """Whether a block is a video, and no text of a message of the model."""
    return isinstance(block, dict) and block["type"] == "video"
