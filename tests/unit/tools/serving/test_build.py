"""What a chat service measures of a processor."""

import torch

from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError
from rl_vlm.tools.serving.build import bytes_of_small_image
from rl_vlm.types import Prompt, Sample


class Tiles(PromptBuilder):
    """Cuts an image into square tiles of 100 bytes, up to 12, and refuses longer ones."""

    def __init__(self) -> None: ...

    def build(self, sample: Sample) -> Prompt:
        (image,) = sample.images
        num_tiles = max(image.size) // min(image.size)
        if num_tiles > 12:
            raise DataError("too long")
        return Prompt(sample, torch.tensor([1]), {}, {"pixels": torch.zeros(num_tiles, 25), "num": torch.tensor([1])})


def test_the_largest_of_the_small_images_that_a_processor_takes():
    assert bytes_of_small_image(Tiles()) == 12 * 100 + 8
