"""A Qwen3-VL of 0.7 million parameters that answers with a box of random place and size, whatever its image shows.

`configs/grounding.yaml` names `starting_model`. It knows the form of an answer, the sizes that boxes have and the order
of numbers, from a short supervised warm-up on random boxes and from the vectors that numbers begin with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from examples.digits import digits
from examples.digits.digits import supervised_batch
from examples.grounding import scenes
from examples.grounding.scenes import COLOURS, QUESTION, SHAPES, SIDES
from rl_vlm.tiny.cached import cached_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

STEP = 50
"""Coordinates of an answer are multiples of this, in thousandths of the image's sides."""
OPENING, BETWEEN, CLOSING = '{"bbox_2d": [', ", ", "]}"
NUMBERS = [f"{number}{end}" for number in range(0, 1001, STEP) for end in (BETWEEN, CLOSING)]
"""Each of these is one token, as `OPENING` is, so that an answer has six tokens with its end."""
FREQUENCIES = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Of the waves in the vectors of numbers: half waves from 0 to 1000."""
PATCH_SIZE = 16
"""In pixels. 2 x 2 patches become one image token, so that an image of 32 x 32 is a single token."""

MAX_PIXELS = 32 * 32
WARM_UP_STEPS, WARM_UP_IMAGES, WARM_UP_LEARNING_RATE = 80, 32, 2e-3


@cached_model(digits, scenes)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that answers `{"bbox_2d": [x1, y1, x2, y2]}` with random numbers."""
    from rl_vlm.tiny.build import build_tiny
    from rl_vlm.tiny.qwen import QWEN
    from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS

    family = QWEN["qwen3_vl"]

    def config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
        built = family.config(tokenizer, hidden_size)
        built.vision_config.patch_size = PATCH_SIZE
        return built

    def processor(tokenizer: Any) -> ProcessorMixin:
        built: Any = family.processor(tokenizer)
        built.image_processor.patch_size = PATCH_SIZE
        return built

    questions = [QUESTION.format(f"{colour} {shape}") for colour in COLOURS for shape in SHAPES]
    build_tiny(
        "qwen3_vl", directory, families={"qwen3_vl": replace(family, config=config, processor=processor)},
        corpus=(*DEFAULT_CORPUS, *questions), whole_tokens=(OPENING, *NUMBERS), initializer_range=0.1, seed=seed,
    )  # fmt: skip
    teach_format(directory, seed)


def random_answer(random: Random) -> str:
    """Return an answer with a box of random place and size, which says nothing of any image.

    Boxes are somewhat denser at the image's edges, so that the most likely one is not in the middle, where it would
    overlap with many objects.
    """
    side = random.uniform(*SIDES)
    x, y = ((1 - side) * random.betavariate(0.7, 0.7) for _ in range(2))
    return answer((x, y, x + side, y + side))


def answer(box: tuple[float, float, float, float]) -> str:
    """Return the answer that gives a box, in shares of the image's sides."""
    return OPENING + BETWEEN.join(str(round(number * 1000 / STEP) * STEP) for number in box) + CLOSING


def order_numbers(model: Any, tokenizer: Any, seed: int) -> None:
    """Overwrite the vectors of numbers by sums of waves, so that numbers that are near have similar vectors."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.tensor(FREQUENCIES)
    weakening = frequencies.clamp(min=1).sqrt()
    for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        size = table.std().item()
        sines, cosines = 1.5 * size * torch.randn(2, len(FREQUENCIES), table.shape[1], generator=generator)
        kinds = size * torch.randn(2, table.shape[1], generator=generator)
        for name in NUMBERS:
            angles = torch.pi * frequencies * int(name.rstrip(BETWEEN + CLOSING)) / 1000
            waves = (angles.sin() / weakening) @ sines + (angles.cos() / weakening) @ cosines
            row = tokenizer.convert_tokens_to_ids(name)
            table.data[row] = waves + kinds[int(name.endswith(CLOSING))] + 0.2 * table.data[row]


def teach_format(directory: Path, seed: int) -> None:
    """Train on images with random boxes, and overwrite the checkpoint's weights."""
    import torch

    from rl_vlm.config.schema import DataConfig, ModelConfig, RunConfig
    from rl_vlm.data.prompts import PromptBuilder, load_processor
    from rl_vlm.data.samples import load_rows
    from rl_vlm.model.loading import load_policy

    data = DataConfig(dataset_name="examples.grounding.scenes:train_rows", max_pixels=MAX_PIXELS)
    config = RunConfig(model=ModelConfig(model_name_or_path=str(directory)), data=data)
    policy = load_policy(config, str(directory))
    processor = load_processor(str(directory), config.model, config.data)
    builder, rows, tokenizer = PromptBuilder(processor, data), load_rows(data, "train"), processor.tokenizer

    order_numbers(policy.transformer, tokenizer, seed)
    prompts = [builder.build(rows[row]) for row in range(WARM_UP_IMAGES)]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=WARM_UP_LEARNING_RATE)
    random = Random(seed)
    for _ in range(WARM_UP_STEPS):
        examples = [(prompt, tokenizer.encode(random_answer(random) + tokenizer.eos_token)) for prompt in prompts]
        optimizer.zero_grad()
        (-policy(supervised_batch(examples)).logprobs_NT.sum() / len(examples)).backward()
        optimizer.step()
    policy.transformer.save_pretrained(directory)
