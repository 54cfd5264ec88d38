"""Converts boxes and points of completions and gold answers to pixels of the original image, to draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.grounding.boxes import Region, read_text
from rewards.grounding.frames import Frames, FrameSize, scaled
from rewards.grounding.scoring import gold_boxes
from rewards.text import answer_text

GROUNDING = ("iou", "giou", "point_in_box", "boxes_f1", "detection_map", "detection_map_length")
"""Built-in functions that read boxes or points."""
DEFAULTS = {"coordinates": "absolute", "solution_coordinates": "original", "image_index": 0}
"""Defaults of these functions' settings."""


@dataclass(frozen=True)
class Regions:
    """Reads regions from rows of a completions file, like the reward functions of the run."""

    frames: Frames

    @classmethod
    def of_rewards(cls, reward_funcs: Sequence[str | Mapping[str, Any]]) -> Regions | None:
        """Build the reader from the setting `rewards.reward_funcs`. Return None if no function reads boxes."""
        for spec in reward_funcs:
            function, kwargs = (spec, {}) if isinstance(spec, str) else (spec["function"], spec.get("kwargs") or {})
            if function in GROUNDING:
                return cls(Frames(**{name: kwargs.get(name, default) for name, default in DEFAULTS.items()}))
        return None

    def predicted(self, row: Mapping[str, Any]) -> list[Region]:
        """Return the regions of a row's completion. Empty if it has none, or if the image's sizes are unknown."""
        return self.drawn(read_text(answer_text(row["completion"])), self.row_frames(row)[0], row)

    def gold(self, row: Mapping[str, Any]) -> list[Region]:
        """Return the regions of the row's `solution`. Empty if it has no readable region."""
        gold = gold_boxes(row.get("data/solution"))
        return self.drawn(gold if isinstance(gold, list) else None, self.row_frames(row)[1], row)

    def row_frames(self, row: Mapping[str, Any]) -> tuple[FrameSize | None, FrameSize | None]:
        """Return width and height of the image in the frames of predicted and of gold regions."""
        frames = self.frames.of_row(row.get("image_sizes"), row.get("model_image_sizes"))
        return frames.predicted, frames.gold

    def drawn(self, regions: Sequence[Region] | None, frame: FrameSize | None, row: Mapping[str, Any]) -> list[Region]:
        """Return the readable regions, converted from `frame` to pixels of the original image."""
        sizes, index = row.get("image_sizes") or [], self.frames.image_index
        if not regions or frame is None or index >= len(sizes):
            return []
        width, height = sizes[index]
        readable = [region for region in regions if region.numbers is not None]
        return scaled(readable, (width / frame[0], height / frame[1]))
