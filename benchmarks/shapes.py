"""The model and the group that benchmarks measure: a small Qwen2.5-VL with random weights.

It has 41 million parameters. On a prompt of 1,000 image and 40 text tokens and a completion of 200, its FLOPs divide
among vision tower, language layers and LM head as those of Qwen2.5-VL-3B do. Head dimensions of 80 and
128, full attention in one vision layer of eight, and the MLPs' ratios are the 3B's too.

                 vision   language   head
    3B           0.431    0.559      0.010
    SMALL        0.434    0.556      0.010
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from benchmarks.flops import Workload
from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.tiny.family import chat_template
from rl_vlm.tiny.qwen import SPECIAL_TOKENS
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer
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

Shape = tuple[dict[str, Any], dict[str, Any]]
"""Sizes of the language model and of the vision tower."""

QWEN2_5_VL_3B: Shape = (
    {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
     "intermediate_size": 11008, "vocab_size": 151936, "mrope_section": [16, 24, 24]},
    {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14,
     "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
)  # fmt: skip
QWEN2_5_VL_7B: Shape = (
    {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
     "intermediate_size": 18944, "vocab_size": 152064, "mrope_section": [16, 24, 24], "tie_word_embeddings": False},
    QWEN2_5_VL_3B[1],
)  # fmt: skip
QWEN_400M: Shape = (
    {"hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 8,
     "intermediate_size": 3072, "vocab_size": 65536, "mrope_section": [8, 12, 12]},
    {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 2048, "patch_size": 14,
     "window_size": 112, "fullatt_block_indexes": [5, 11]},
)  # fmt: skip
"""A Qwen2.5-VL of 400 million parameters."""
SMALL: Shape = (
    {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 1,
     "intermediate_size": 3440, "vocab_size": 5632, "mrope_section": [16, 24, 24]},
    {"depth": 8, "hidden_size": 240, "num_heads": 3, "intermediate_size": 640, "patch_size": 7,
     "window_size": 56, "fullatt_block_indexes": [7]},
)  # fmt: skip
NARROW: Shape = (
    {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
     "intermediate_size": 384, "vocab_size": 2048, "mrope_section": [4, 6, 6]},
    {"depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 192, "patch_size": 7,
     "window_size": 56, "fullatt_block_indexes": [2]},
)  # fmt: skip
"""One million parameters, for prompts with videos of 8,192 tokens on a CPU."""
MEDIUM: Shape = (
    {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
     "intermediate_size": 4096, "vocab_size": 16384, "mrope_section": [16, 24, 24]},
    {"depth": 8, "hidden_size": 512, "num_heads": 8, "intermediate_size": 1536, "patch_size": 14,
     "window_size": 112, "fullatt_block_indexes": [7]},
)  # fmt: skip
"""Four hundred million parameters, of which nine tenths are in the language model's layers."""
TOY: Shape = (
    {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
     "intermediate_size": 128, "vocab_size": 512, "mrope_section": [2, 3, 3]},
    {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4,
     "window_size": 32, "fullatt_block_indexes": [1]},
)  # fmt: skip
"""For tests of the benchmarks themselves."""

QWEN3_VL: Shape = (
    {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
     "intermediate_size": 1536, "vocab_size": 16384, "mrope_section": [12, 10, 10]},
    {"depth": 6, "hidden_size": 384, "num_heads": 6, "intermediate_size": 1024, "patch_size": 14,
     "deepstack_visual_indexes": [1, 3, 5]},
)  # fmt: skip
"""A Qwen3-VL of 70 million parameters, whose vision tower also adds features to the first language layers."""
TOY_QWEN3_VL: Shape = (
    TOY[0] | {"head_dim": 16},
    {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4,
     "deepstack_visual_indexes": [0]},
)  # fmt: skip

HYBRID: Shape = (
    {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128,
     "intermediate_size": 2304, "vocab_size": 5632, "mrope_section": [11, 11, 10], "linear_num_key_heads": 3,
     "linear_num_value_heads": 6, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    {"depth": 6, "hidden_size": 240, "num_heads": 3, "intermediate_size": 896, "patch_size": 8},
)  # fmt: skip
"""A Qwen3.5 of 41 million parameters: three layers of linear attention to one of attention, as it has."""
TOY_HYBRID: Shape = (
    TOY[0] | {"head_dim": 16, "mrope_section": [2, 1, 1], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
              "linear_key_head_dim": 16, "linear_value_head_dim": 16,
              "layer_types": ["linear_attention", "full_attention"]},
    {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4},
)  # fmt: skip

SIX_LAYERS: Shape = (SMALL[0] | {"num_hidden_layers": 6}, SMALL[1])
"""Fifty-six million parameters."""
QUARTER: Shape = (MEDIUM[0] | {"num_hidden_layers": 6}, MEDIUM[1])
SHAPES = {
    "small": SMALL, "narrow": NARROW, "six_layers": SIX_LAYERS, "medium": MEDIUM, "quarter": QUARTER, "toy": TOY,
    "hybrid": HYBRID, "toy_hybrid": TOY_HYBRID,
    "qwen3_vl": QWEN3_VL, "toy_qwen3_vl": TOY_QWEN3_VL, "400m": QWEN_400M, "3b": QWEN2_5_VL_3B,
    "7b": QWEN2_5_VL_7B,
}  # fmt: skip
LORA_R = 5
"""LoRA rank for SMALL: the same fraction of its width as rank 16 is of the 3B's."""
FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 32, 256
"""Completions are drawn from these ids: bytes, no special tokens."""


def is_qwen3_vl(shape: Shape) -> bool:
    return "deepstack_visual_indexes" in shape[1]


def is_hybrid(shape: Shape) -> bool:
    return "layer_types" in shape[0]


def model_config(shape: Shape, tokenizer: Any = None) -> Any:
    """Build the config of a model. Without a tokenizer special tokens keep the class's ids."""
    from transformers import Qwen2_5_VLConfig, Qwen3_5Config, Qwen3VLConfig

    config_class = Qwen3_5Config if is_hybrid(shape) else Qwen3VLConfig if is_qwen3_vl(shape) else Qwen2_5_VLConfig
    text, vision = (dict(part) for part in shape)
    tied = text.pop("tie_word_embeddings", True)
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e6, "mrope_section": text.pop("mrope_section"),
    }  # fmt: skip
    if is_hybrid(shape):
        text["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_interleaved": True}
    vision["out_hidden_size"] = text["hidden_size"]
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        names = ("vision_start", "vision_end", "image", "video")
        ids = {
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
            for name, token in zip(names, SPECIAL_TOKENS, strict=True)
        }
    return config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)


def build_checkpoint(shape: Shape, directory: Path, seed: int = 0) -> Path:
    """Write random weights and a processor to `directory`."""
    from transformers import AutoModelForImageTextToText

    config = write_config(shape, directory)
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    return directory


def write_config(shape: Shape, directory: Path) -> Any:
    """Write a processor and the model's configuration to `directory`, and return the latter."""
    tokenizer = train_tokenizer(DEFAULT_CORPUS, SPECIAL_TOKENS)
    config = model_config(shape, tokenizer)
    config.save_pretrained(directory)
    write_processor(shape, tokenizer, directory)
    return config


def write_processor(shape: Shape, tokenizer: Any, directory: Path) -> None:
    """Write a processor that takes images of any size."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    sizes: dict[str, Any] = {"patch_size": shape[1]["patch_size"], "merge_size": 2}
    images = Qwen2VLImageProcessor(**sizes, min_pixels=1, max_pixels=2**26)
    template = chat_template(*(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")))
    of_videos: dict[str, Any] = sizes | {"size": {"shortest_edge": 1, "longest_edge": 2**30}}
    if is_qwen3_vl(shape) or is_hybrid(shape):
        processor_class, videos = Qwen3VLProcessor, Qwen3VLVideoProcessor(**of_videos)
    else:
        processor_class, videos = Qwen2_5_VLProcessor, Qwen2VLVideoProcessor(**of_videos)
    processor_class(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=template
    ).save_pretrained(directory)


def make_image(work: Workload, shape: Shape, seed: int = 0) -> Image.Image:
    """Make an image of noise that the processor turns into exactly `work.image_tokens` tokens."""
    return Image.fromarray(make_frames(work, shape, seed)[0])


def make_video(work: Workload, shape: Shape, seed: int = 0) -> Video:
    """Make a video of noise that the processor turns into exactly `work.image_tokens` tokens.

    It has 2 frames per second.
    """
    indices = tuple(range(0, 12 * work.num_frames, 12))
    return Video(make_frames(work, shape, seed), indices, 24.0, 12 * work.num_frames, work.num_frames / 2)


def make_frames(work: Workload, shape: Shape, seed: int) -> Any:
    """Make frames of noise, an array (frames, height, width, 3) of uint8."""
    height, width = (2 * shape[1]["patch_size"] * side for side in work.image_grid)
    generator = torch.Generator().manual_seed(seed)
    size = (max(1, work.num_frames), height, width, 3)
    return torch.randint(256, size, generator=generator, dtype=torch.uint8).numpy()


def make_prompt(checkpoint: Path, work: Workload, shape: Shape, seed: int = 0) -> Prompt:
    """Build a prompt of exactly `work.prompt_tokens` tokens. Raises ValueError if it has more even without text."""
    from transformers import AutoProcessor

    builder = PromptBuilder(AutoProcessor.from_pretrained(checkpoint), DataConfig(), video_format="native")
    kind = "video" if work.num_frames else "image"
    images, videos = ([], [make_video(work, shape, seed)]) if work.num_frames else ([make_image(work, shape, seed)], [])

    def build(num_characters: int) -> Prompt:
        text = "~" * num_characters  # one token each, as no merge of the tokenizer contains it
        messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
        return builder.build(Sample("sample", messages, images, {}, messages, videos=videos))

    missing = work.prompt_tokens - len(build(0).token_ids)
    if missing < 0:
        raise ValueError(f"text_tokens is {work.text_tokens}; the chat template alone needs {-missing} more")
    return build(missing)


def make_observations(checkpoint: Path, work: Workload, shape: Shape) -> list[Observation]:
    """Build an observation for each completion: an image of its own and a text, in the tokens of a prompt of both.

    There are none if the work observes nothing.
    """
    if not work.path_tokens > work.completion_tokens:
        return []
    rendered = [make_prompt(checkpoint, work.observation, shape, seed) for seed in range(1, 1 + work.num_generations)]
    return [
        Observation(f"observation {i}", each.token_ids, each.token_inputs, each.mm_inputs, (b"",))
        for i, each in enumerate(rendered)
    ]


def make_trajectories(group: ScoredGroup, observations: Sequence[Observation]) -> ScoredGroup:
    """Return the group with an observation in the middle of each completion."""

    def observed(completion: Completion, observation: Observation) -> Completion:
        first = len(completion.token_ids) // 2
        context = Context((first, observation, len(completion.token_ids) - first))
        return dataclasses.replace(completion, contexts=(context,))

    completions = [observed(*pair) for pair in zip(group.group.completions, observations, strict=True)]
    return dataclasses.replace(group, group=dataclasses.replace(group.group, completions=completions))


def make_group(prompt: Prompt, work: Workload, seed: int = 0) -> ScoredGroup:
    """Build a group of random completions with rewards 0, 1, 2, … and TRL's advantages for them."""
    from rl_vlm.algorithm.advantages import compute_advantages

    generator = torch.Generator().manual_seed(seed)
    shape = (work.num_generations, work.completion_tokens)
    ids = torch.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN, shape, generator=generator)
    rewards = torch.arange(work.num_generations, dtype=torch.float32)
    valid = torch.ones_like(rewards, dtype=torch.bool)
    completions = [Completion(row, torch.zeros(len(row)), "length", "") for row in ids]
    return ScoredGroup(
        Group("group", prompt, completions, policy_version=0),
        scores_GF=rewards[:, None],
        rewards_G=rewards,
        advantages_G=compute_advantages(rewards[None], valid[None], "group").advantages_PG[0],
        valid_G=valid,
        has_variance=True,
    )


def micro_batch(groups: Sequence[ScoredGroup], shared: bool) -> MicroBatch:
    """Put whole groups in one micro-batch."""
    return MicroBatch([SubGroup(group, list(range(len(group.group.completions)))) for group in groups], shared)


def random_policy(config: RunConfig, checkpoint: str, device: torch.device) -> Policy:
    """Make the policy of a run on the device, of which `checkpoint` has no more than the configuration.

    Matrices are normal with a deviation of 0.02, norms are 1, and biases 0. Nothing is written or copied.
    """
    policy = load_policy(config, checkpoint, empty=True)
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # tied weights stay tied
                    made[id(parameter)] = random_weight(name, parameter, device, generator)
                module._parameters[name] = made[id(parameter)]
    return policy.to(device)


def random_weight(name: str, like: nn.Parameter, device: torch.device, generator: torch.Generator) -> nn.Parameter:
    """Make a weight of the same shape, dtype and need of a gradient."""
    weight = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.ndim > 1:
        weight.normal_(0.0, 0.02, generator=generator)
    else:
        weight.fill_(float(name == "weight"))
    return nn.Parameter(weight, requires_grad=like.requires_grad)
