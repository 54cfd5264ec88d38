"""Positions of paths are computed once for all paths of the same form."""

import torch

from rl_vlm.model.layout import form_of
from rl_vlm.types import Observation, Path


def path(length: int = 6, place: int = 2, ids: tuple[int, ...] = (5, 9, 9), grid: tuple[int, ...] = (1, 2, 4)) -> Path:
    pixels = {"pixel_values": torch.rand(8, 3), "image_grid_thw": torch.tensor([grid])}
    observation = Observation("o", torch.tensor(ids), {}, pixels)
    return Path(torch.randint(100, (length,)), torch.ones(length, dtype=torch.bool), {place: observation})


def test_the_form_of_a_path_is_all_that_its_positions_depend_on():
    assert form_of(path()) == form_of(path())  # sampled tokens and pixels differ
    others = [path(length=7), path(place=1), path(ids=(5, 9, 8)), path(grid=(1, 4, 2))]
    assert len({form_of(each) for each in (path(), *others)}) == 5
