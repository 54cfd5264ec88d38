"""The built-in reward functions by name. Their keyword-only parameters are settings, the others are columns.

A function raises TypeError or ValueError for invalid settings before it reads a completion. So a call without
completions checks them. Such a call is cheap: no model is loaded, and no server is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rewards.answers.choice import choice
from rewards.answers.counting import counting
from rewards.answers.exact_match import exact_match
from rewards.answers.maths import maths
from rewards.answers.numeric import numeric
from rewards.answers.short_answer import short_answer
from rewards.answers.yes_no import yes_no
from rewards.contract import RewardFunction
from rewards.formats.boxed import boxed
from rewards.formats.format_tags import format_tags
from rewards.formats.json_schema import json_schema
from rewards.grounding.boxes_f1 import boxes_f1
from rewards.grounding.detection_map import detection_map
from rewards.grounding.detection_map_length import detection_map_length
from rewards.grounding.giou import giou
from rewards.grounding.iou import iou
from rewards.grounding.point_in_box import point_in_box
from rewards.judges.judge import judge
from rewards.judges.reward_model import reward_model
from rewards.overlap.character_error_rate import character_error_rate
from rewards.overlap.edit_similarity import edit_similarity
from rewards.overlap.rouge_l import rouge_l
from rewards.shaping.cosine_length import cosine_length
from rewards.shaping.language import language
from rewards.shaping.overlong import overlong
from rewards.shaping.repetition import repetition
from rewards.temporal.order import order
from rewards.temporal.temporal_iou import temporal_iou
from rewards.temporal.temporal_recall import temporal_recall
from rewards.temporal.time_distance import time_distance

BUILT_INS: dict[str, RewardFunction] = {
    "boxed": boxed,
    "boxes_f1": boxes_f1,
    "character_error_rate": character_error_rate,
    "choice": choice,
    "cosine_length": cosine_length,
    "counting": counting,
    "detection_map": detection_map,
    "detection_map_length": detection_map_length,
    "edit_similarity": edit_similarity,
    "exact_match": exact_match,
    "format_tags": format_tags,
    "giou": giou,
    "iou": iou,
    "json_schema": json_schema,
    "judge": judge,
    "language": language,
    "maths": maths,
    "numeric": numeric,
    "order": order,
    "overlong": overlong,
    "point_in_box": point_in_box,
    "repetition": repetition,
    "reward_model": reward_model,
    "rouge_l": rouge_l,
    "short_answer": short_answer,
    "temporal_iou": temporal_iou,
    "temporal_recall": temporal_recall,
    "time_distance": time_distance,
    "yes_no": yes_no,
}

PACKAGES: dict[str, tuple[str, ...]] = {
    "boxes_f1": ("json_repair", "scipy"),
    "character_error_rate": ("rapidfuzz",),
    "detection_map": ("json_repair",),
    "detection_map_length": ("json_repair",),
    "edit_similarity": ("rapidfuzz",),
    "giou": ("json_repair",),
    "iou": ("json_repair",),
    "json_schema": ("jsonschema",),
    "language": ("py3langid",),
    "maths": ("math_verify",),
    "point_in_box": ("json_repair", "scipy"),
    "rouge_l": ("rapidfuzz",),
}
"""Modules of packages in the extra `rewards` that a function imports when it is called."""

TIMEOUTS: dict[str, float] = {"json_schema": 30.0, "maths": 60.0}
"""Default timeouts, in seconds, of functions that run in a worker process."""

ASKS_A_MODEL = ("judge", "reward_model")
"""Functions whose calls are expensive. Checks before a run leave them out."""

LARGEST_SCORES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "cosine_length": lambda settings: settings["max_value_correct"],
    "reward_model": lambda settings: 1.0 if settings["sigmoid"] else math.inf,
}
"""Functions that may score more than 1.0, with the largest score for given settings."""
