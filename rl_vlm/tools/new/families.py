"""Families of new projects: a real model of each, and the settings with which its tiny model learns a kind of task.

Processors of these families need no package beyond the dependencies of rl-vlm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ANSWER: dict[str, Any] = {"max_steps": 160, "learning_rate": "1.0e-3", "eval_steps": 40, "tokens_per_side": 2}
GAME: dict[str, Any] = {"max_steps": 48, "learning_rate": "1.5e-3", "eval_steps": 12, "tokens_per_side": 1}
BOX: dict[str, Any] = {"max_steps": 200, "learning_rate": "2.0e-3", "eval_steps": 50, "tokens_per_side": 1}


@dataclass(frozen=True)
class NewFamily:
    """One family."""

    model: str
    """Name of a real model on the hub."""
    settings: dict[str, dict[str, Any]]
    """Values of `run.yaml` for each kind of task that its tiny model learns."""


ALL = {"answer": ANSWER, "box": BOX, "environment": GAME}
FAMILIES: dict[str, NewFamily] = {
    "qwen2_5_vl": NewFamily("Qwen/Qwen2.5-VL-3B-Instruct", ALL),
    "qwen2_vl": NewFamily("Qwen/Qwen2-VL-2B-Instruct", {"answer": ANSWER}),
    "qwen3_vl": NewFamily("Qwen/Qwen3-VL-4B-Instruct", ALL),
    "internvl": NewFamily("OpenGVLab/InternVL3-2B-hf", ALL),
    "llava": NewFamily("llava-hf/llava-1.5-7b-hf", {"answer": ANSWER | {"max_steps": 200, "tokens_per_side": 4}}),
    "gemma3": NewFamily("google/gemma-3-4b-it", {"answer": ANSWER | {"max_steps": 200}}),
}
