"""What the integration tests build: tiny policies, prompts with images, groups; and how gradients are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.sampler import Draw
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.types import (
    Completion,
    Context,
    Group,
    MicroBatch,
    Observation,
    Prompt,
    Sample,
    ScoredGroup,
    SubGroup,
    Video,
)
from tests.tiny.build import build_tiny

QUESTION = "Which digit is this?"
BYTE_TOKENS = range(32, 256)
"""Tokens that every tiny tokenizer has and that are not special."""


LORA_EVERYWHERE: dict[str, Any] = {
    "use_peft": True, "lora_r": 4, "lora_exclude_modules": r".*((layers|blocks|merger_list)\.\d+|router|indexer\..*)",
}  # fmt: skip
"""An adapter also in the vision tower. PEFT would take `blocks.0` for a linear layer `mlp.0` if there are experts."""


def sharp_checkpoint(family: str, directory: Path, **options: Any) -> Path:
    """A tiny checkpoint of which wrong masks and positions show. `options` are those of `build_tiny`."""
    return sharpen(build_tiny(family, directory, **options))


def sharpen(checkpoint: Path) -> Path:
    """Scale the language model's matrices by 4: at its initial weights a tiny model attends almost evenly."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        decoder: Any = model.get_decoder()
        decoder = getattr(decoder, "model", decoder)  # Llama 4 returns its causal model
        for parameter in decoder.layers.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    model.save_pretrained(checkpoint)
    return checkpoint


def make_policy(
    checkpoint: Path, gradient_checkpointing: bool | str = False, activation_offloading: bool = False, **model: Any
) -> Policy:
    """A policy in train mode without banned tokens; a LoRA adapter gets weights that have an effect."""
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(checkpoint), **model},
            "memory": {
                "gradient_checkpointing": gradient_checkpointing, "activation_offloading": activation_offloading,
            },
        }
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the adapter's weights: those of some seeds amplify rounding errors tenfold
        policy = load_policy(config, str(checkpoint)).train()
    policy.banned_token_ids = []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@lru_cache(maxsize=4)
def processor_of(checkpoint: Path) -> Any:
    """The checkpoint's processor, which takes about as long to load as the tiny model."""
    return AutoProcessor.from_pretrained(checkpoint)


def make_prompt(checkpoint: Path, images: Sequence[Image.Image], text: str = QUESTION) -> Prompt:
    """A prompt with the images before the text."""
    builder = PromptBuilder(processor_of(checkpoint), DataConfig())
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return builder.build(Sample("s", messages, list(images), {}, messages))


def make_group(prompt: Prompt, lengths: Sequence[int], seed: int = 0) -> ScoredGroup:
    """A group of random completions of these lengths, all of them valid, with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = [torch.randint(BYTE_TOKENS.start, BYTE_TOKENS.stop, (n,), generator=generator) for n in lengths]
    completions = [Completion(ids, torch.zeros(len(ids)), "stop", "") for ids in token_ids]
    num = len(lengths)
    return ScoredGroup(
        Group("g", prompt, completions, policy_version=0),
        scores_GF=torch.zeros(num, 1),
        rewards_G=torch.zeros(num),
        advantages_G=torch.randn(num, generator=generator),
        valid_G=torch.ones(num, dtype=torch.bool),
        has_variance=True,
    )


def make_observation(checkpoint: Path, images: Sequence[Image.Image], text: str) -> Observation:
    """An observation with the tokens of a prompt of its own, which the model reads as any others."""
    prompt = make_prompt(checkpoint, images, text)
    files = tuple(png(image) for image in images)
    return Observation(text, prompt.token_ids, prompt.token_inputs, prompt.mm_inputs, files)


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()


def make_trajectories(prompt: Prompt, some: Sequence[Sequence[Context]], seed: int = 0) -> ScoredGroup:
    """A group of random completions, each with these contexts."""
    group = make_group(prompt, [sum(context.num_sampled for context in contexts) for contexts in some], seed)
    pairs = zip(group.group.completions, some, strict=True)
    completions = [replace(completion, contexts=tuple(contexts)) for completion, contexts in pairs]
    return replace(group, group=replace(group.group, completions=completions))


class Rebuilder:
    """A builder of what states leave out: prompts of rows by a function, and images by a processor, if there is one."""

    def __init__(self, build: Callable[[Draw], Prompt], builder: Any = None) -> None:
        self.build_row, self.builder = build, builder or WithoutImages()

    def build(self, draw: Draw) -> Prompt:
        return self.build_row(draw)


class WithoutImages:
    """A builder for observations of text."""

    def build(self, sample: Sample) -> Prompt:
        raise AssertionError("no sample is built")

    def media_inputs(self, media: Sequence[Image.Image | Video]) -> dict[str, Tensor]:
        assert not media
        return {}


def make_groups(checkpoint: Path, shapes: Sequence[tuple[Sequence[Image.Image], Sequence[int]]]) -> list[ScoredGroup]:
    """A group for each pair of images and completion lengths, with questions of different lengths."""
    return [
        make_group(make_prompt(checkpoint, images, text=f"{QUESTION} {'no ' * i}"), lengths, seed=i)
        for i, (images, lengths) in enumerate(shapes)
    ]


def answered_group(prompt: str | list[dict[str, Any]], texts: Sequence[str], solution: str = "7") -> Group:
    """Build a group whose completions are texts, for reward functions."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    sample = Sample("s0", messages, [], {"solution": solution}, prompt)
    completions = [Completion(torch.tensor([1]), torch.zeros(1), "stop", text) for text in texts]
    return Group("g0", Prompt(sample, torch.tensor([1]), {}, {}), completions, policy_version=0)


def whole(groups: Sequence[ScoredGroup], shared: bool) -> MicroBatch:
    """All groups in one micro-batch."""
    return MicroBatch([SubGroup(group, list(range(len(group.group.completions)))) for group in groups], shared)


def take_gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; the module has none afterwards."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return gradients


def gradient_error(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest ‖Δ‖ / max(‖g‖, 1e-3 · largest ‖g‖) over all parameters."""
    assert ours.keys() == expected.keys()
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    return max(float((ours[n] - g).norm() / g.norm().clamp(min=floor)) for n, g in expected.items())
