"""Frames of coordinates: the units of a box's numbers, and their conversion from one frame to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rewards.contract import Fault, plain
from rewards.grounding.boxes import Region

Coordinates = Literal["absolute", "original", "relative", "per_mille"]
FrameSize = tuple[float, float]

FAR_OUTSIDE = 0.1
"""A gold box may extend beyond its image by this share of a side, since data sets round."""


@dataclass(frozen=True)
class Frames:
    """The frames of predicted and gold boxes, and the index of the row's image that they belong to."""

    coordinates: Coordinates
    solution_coordinates: Coordinates
    image_index: int

    def __post_init__(self) -> None:
        for name in ("coordinates", "solution_coordinates"):
            if getattr(self, name) not in get_args(Coordinates):
                known = ", ".join(get_args(Coordinates))
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be one of {known}")
        if isinstance(self.image_index, bool) or not isinstance(self.image_index, int):
            raise TypeError(f"`image_index` is {self.image_index!r}; it must be an integer, 0 for a row's first image")
        if self.image_index < 0:
            raise ValueError(f"`image_index` is {self.image_index}; it must be 0 or more")

    def of_row(self, image_sizes: Any, model_image_sizes: Any) -> RowFrames:
        """Return the frames of one row with these image sizes."""
        sizes = {
            "relative": (1.0, 1.0),
            "per_mille": (1000.0, 1000.0),
            "original": _size(image_sizes, self.image_index),
            "absolute": _size(model_image_sizes, self.image_index),
        }
        return RowFrames(self, sizes[self.coordinates], sizes[self.solution_coordinates])


@dataclass(frozen=True)
class RowFrames:
    """The frames of one row's boxes, with the size of its image."""

    frames: Frames
    predicted: FrameSize | None
    """Width and height of the whole image in the frame of predictions. None if the image's size is unknown."""
    gold: FrameSize | None

    def factors(self) -> FrameSize | Fault:
        """Return the factors that convert predicted x and y to the frame of the gold boxes.

        Equal frames need no sizes. Otherwise an unknown size is a fault.
        """
        if self.frames.coordinates == self.frames.solution_coordinates:
            return 1.0, 1.0
        if self.predicted is None or self.gold is None:
            setting = "coordinates" if self.predicted is None else "solution_coordinates"
            named = getattr(self.frames, setting)
            column = "image_sizes" if named == "original" else "model_image_sizes"
            place = f"`{column}` has no image {self.frames.image_index} of the row"
            return Fault("type", f"`{setting}: {named}` needs the size of the image, but {place}")
        return self.gold[0] / self.predicted[0], self.gold[1] / self.predicted[1]

    def misplaced(self, gold: Sequence[Region]) -> Fault | None:
        """Return a fault if a gold box cannot be in the frame of `solution_coordinates`."""
        named = self.frames.solution_coordinates
        for region in gold:
            numbers = region.numbers or ()
            if self.gold is not None and _leaves(numbers, self.gold):
                place = f"leaves its image, which is {self.gold[0]:g} wide and {self.gold[1]:g} high"
            elif named != "relative" and max(numbers) <= 1:
                place = "seems to be relative"
            else:
                continue
            message = f"a box of `solution`, {_shown(numbers)}, {place}; `solution_coordinates` is {named}"
            return Fault("type", message)
        return None


def _leaves(numbers: Sequence[float], size: FrameSize) -> bool:
    shares = [number / size[i % 2] for i, number in enumerate(numbers)]
    return min(shares) < -FAR_OUTSIDE or max(shares) > 1 + FAR_OUTSIDE


def _shown(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"


def scaled(regions: Sequence[Region], factors: FrameSize) -> list[Region]:
    """Multiply x and y of the regions by these factors."""
    return [
        region._replace(numbers=tuple(number * factors[i % 2] for i, number in enumerate(region.numbers)))
        if region.numbers is not None
        else region
        for region in regions
    ]


def _size(sizes: Any, index: int) -> FrameSize | None:
    """Return width and height of an image, or None if they are missing."""
    if sizes is None or not hasattr(sizes, "__len__") or len(sizes) <= index:
        return None
    size = [plain(side) for side in sizes[index]]
    return (float(size[0]), float(size[1])) if len(size) == 2 and min(size) > 0 else None
