"""The group-shared row against one padded row per completion, and what would make them differ, for the Qwen-VL line.

The other families are in test_families.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_vlm.errors import ModelError
from rl_vlm.model.layout import ForwardInputs
from rl_vlm.model.policy import Policy
from rl_vlm.tiny.qwen import QWEN
from rl_vlm.types import Completion, Forward, MicroBatch, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_groups,
    make_policy,
    noise_image,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.helpers.wrong_rows import WRONG_ROWS, effect

ONE_IMAGE = [noise_image(32, 24, seed=1)]
THREE_IMAGES = [noise_image(48, 16, seed=2), noise_image(16, 64, seed=3), noise_image(24, 24, seed=4)]
CASES = {
    "one image": [(ONE_IMAGE, [5, 1, 9, 3])],
    "images of three sizes": [(THREE_IMAGES, [5, 1, 9, 3])],
    "no image": [([], [5, 1, 9, 3])],
    "one token each": [(ONE_IMAGE, [1, 1]), ([], [1])],
    "mixed prompts": [(ONE_IMAGE, [1, 9, 4]), ([], [6, 2]), (THREE_IMAGES, [3]), ([], [1, 1, 7])],
}
VARIANTS = {
    "checkpointing": {"gradient_checkpointing": True},
    "frozen vision": {"freeze_vision_tower": True},
    "frozen vision, checkpointing": {"freeze_vision_tower": True, "gradient_checkpointing": True},
    "LoRA": {"use_peft": True, "lora_r": 4},
    "LoRA, checkpointing": {"use_peft": True, "lora_r": 4, "gradient_checkpointing": True},
    "LoRA, vision too": {"use_peft": True, "lora_r": 4, "lora_exclude_modules": []},
}


@pytest.fixture(scope="module", params=sorted(QWEN))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    """Every weight is trained."""
    return make_policy(checkpoint)


def scores_and_gradients(policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, entropies, and gradients of a random weighting of the log-probs."""
    scores = policy(Forward(batch))
    weights = torch.randn(scores.logprobs_NT.shape, generator=torch.Generator().manual_seed(0))
    (weights * scores.logprobs_NT).sum().backward()
    return scores.logprobs_NT.detach(), scores.entropies_NT, take_gradients(policy)


def assert_shared_equals_dense(policy: Policy, groups: list[ScoredGroup]) -> None:
    logprobs, entropies, gradients = scores_and_gradients(policy, whole(groups, shared=True))
    dense_logprobs, dense_entropies, dense_gradients = scores_and_gradients(policy, whole(groups, shared=False))
    assert (logprobs - dense_logprobs).abs().max() <= 1e-5
    assert (entropies - dense_entropies).abs().max() <= 1e-5
    assert gradient_error(gradients, dense_gradients) <= 1e-5


def trains(gradients: dict[str, Tensor], part: str) -> bool:
    return any(part in name for name in gradients)


@pytest.mark.parametrize("case", CASES)
def test_shared_equals_dense(checkpoint: Path, policy: Policy, case: str) -> None:
    text = policy.transformer.config.get_text_config()
    assert text.num_key_value_heads < text.num_attention_heads  # grouped-query attention
    assert_shared_equals_dense(policy, make_groups(checkpoint, CASES[case]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_equals_dense_for_each_way_to_train(checkpoint: Path, variant: str) -> None:
    policy = make_policy(checkpoint, **VARIANTS[variant])
    groups = make_groups(checkpoint, CASES["mixed prompts"])
    assert_shared_equals_dense(policy, groups)

    _, _, gradients = scores_and_gradients(policy, whole(groups, shared=True))
    assert trains(gradients, "language_model")
    assert trains(gradients, "visual") == (variant in ("checkpointing", "LoRA, vision too"))
    assert trains(gradients, "lora_") == variant.startswith("LoRA")


def test_a_micro_batch_scores_as_its_groups_do_alone(checkpoint: Path, policy: Policy) -> None:
    groups = make_groups(checkpoint, CASES["mixed prompts"])
    together = policy(Forward(whole(groups, shared=True))).logprobs_NT
    alone = [row for group in groups for row in policy(Forward(whole([group], shared=True))).logprobs_NT]
    for row, expected in zip(together, alone, strict=True):
        assert (row[: len(expected)] - expected).abs().max() <= 1e-5
        assert not row[len(expected) :].any()


@pytest.mark.parametrize("change", WRONG_ROWS)
def test_what_must_not_happen_would_show(
    checkpoint: Path, policy: Policy, change: Callable[[ForwardInputs], ForwardInputs]
) -> None:
    assert effect(policy, make_groups(checkpoint, CASES["one image"]), change) >= 0.01


@contextmanager
def counted_vision(policy: Policy) -> Iterator[list[int]]:
    """Patches of each forward of the vision tower's first block, recomputation by checkpointing included."""
    patches: list[int] = []
    hook = policy.transformer.model.visual.blocks[0].register_forward_pre_hook(
        lambda _, args: patches.append(len(args[0]))
    )
    try:
        yield patches
    finally:
        hook.remove()


def num_patches(groups: list[ScoredGroup]) -> int:
    return sum(len(group.group.prompt.mm_inputs.get("pixel_values", ())) for group in groups)


def test_the_vision_tower_sees_each_prompts_images_once(checkpoint: Path, policy: Policy) -> None:
    groups = make_groups(checkpoint, CASES["mixed prompts"])
    with counted_vision(policy) as patches:
        scores_and_gradients(policy, whole(groups, shared=True))
    assert patches == [num_patches(groups)]
    with counted_vision(policy) as patches:
        scores_and_gradients(policy, whole(groups, shared=False))
    assert patches == [num_patches(groups)]


@pytest.mark.parametrize(
    ("variant", "num_forwards"),
    [("checkpointing", 2), ("frozen vision, checkpointing", 1), ("LoRA, checkpointing", 1)],
)
def test_only_a_trained_vision_tower_is_recomputed(checkpoint: Path, variant: str, num_forwards: int) -> None:
    policy = make_policy(checkpoint, **VARIANTS[variant])
    groups = make_groups(checkpoint, CASES["images of three sizes"])
    with counted_vision(policy) as patches:
        scores_and_gradients(policy, whole(groups, shared=True))
    assert patches == [num_patches(groups)] * num_forwards


PLACEHOLDER = -1


@pytest.mark.parametrize(
    ("token_ids", "found"), [([40, PLACEHOLDER, 50], r"holds placeholder tokens \[\d+\]"), ([], "is empty")]
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_completion_that_cannot_be_scored_is_an_error(
    checkpoint: Path, token_ids: list[int], found: str, shared: bool
) -> None:
    policy = make_policy(checkpoint)
    policy.banned_token_ids = policy.family.banned_token_ids(policy.transformer.config)
    group = make_groups(checkpoint, CASES["one image"])[0]
    tokens = [policy.banned_token_ids[0] if token == PLACEHOLDER else token for token in token_ids]
    group.group.completions[2] = Completion(
        torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), "length", ""
    )
    with pytest.raises(ModelError, match=f"Completion 2 of sample s {found}"):
        policy(Forward(whole([group], shared)))
