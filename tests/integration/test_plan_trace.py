"""Bytes of steps on fake tensors, against those of the same steps on real ones."""

import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rl_vlm.config.schema import RunConfig
from rl_vlm.model.loading import load_policy
from rl_vlm.model.reference import load_reference
from rl_vlm.passes.peaks import Block
from rl_vlm.plan.tracing.live import LiveBytes
from rl_vlm.plan.tracing.step import TracedSteps, trace_steps
from rl_vlm.stages import Stage
from rl_vlm.types import ScoredGroup
from tests.helpers.builders import make_groups, noise_image
from tests.tiny.build import build_tiny

NUM_STEPS = 2
TOKENS = 150
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 4.0, "freeze_vision_tower": True}
LORA_BY_PART = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["lm_head", "projector", "vision_tower"]}


class RealBytes(LiveBytes):
    """Counts the storages of real tensors by their data pointers. Those that exist at the start do not count."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta]
        self.kept = [tensor for tensor in tensors if tensor.layout == torch.strided]  # else addresses are used again
        self.existing = {tensor.untyped_storage().data_ptr() for tensor in self.kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: Any) -> None:
        pointer = storage.data_ptr()
        if pointer and pointer not in self.existing and pointer not in self.sizes:
            self.sizes[pointer] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, pointer)


def traced(config: RunConfig, checkpoint: Path, groups: list[ScoredGroup]) -> list[dict[str, list[int]]]:
    steps = trace_steps(config, str(checkpoint), groups, NUM_STEPS)
    return [growth(step) for step in steps]


def measured(config: RunConfig, checkpoint: Path, groups: list[ScoredGroup]) -> list[dict[str, list[int]]]:
    policy = load_policy(config, str(checkpoint))
    reference = load_reference(config, str(checkpoint), policy, resumed=None)
    with RealBytes() as live:
        steps = TracedSteps(config, policy, reference, groups, NUM_STEPS, live, TOKENS)
        return [growth(steps.take()) for _ in range(NUM_STEPS)]


def growth(blocks: Mapping[Stage, Block]) -> dict[str, list[int]]:
    """Bytes in each stage at most and at its end, above those before it."""
    return {stage: [block.peak - block.before, block.after - block.before] for stage, block in blocks.items()}


def run_config(checkpoint: Path, **sections: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"model_name_or_path": str(checkpoint), "verify": "off"},
        "rollout": {"num_generations": 4, "max_completion_length": 24},
        "memory": {"micro_batch_tokens": TOKENS, "gradient_checkpointing": False},
    }
    return RunConfig.model_validate({name: given.get(name, {}) | sections.get(name, {}) for name in given | sections})


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        pytest.param("qwen2_5_vl", {}, marks=pytest.mark.slow),
        ("qwen2_5_vl", {"memory": {"gradient_checkpointing": True}}),
        pytest.param("qwen2_5_vl", {"algorithm": {"beta": 0.1}}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", {"model": LORA, "algorithm": {"beta": 0.1}}, marks=pytest.mark.slow),
        ("qwen2_5_vl", {"model": LORA_BY_PART, "algorithm": {"beta": 0.1}}),
        pytest.param("qwen2_5_vl", {"model": {"dtype": "bfloat16"}}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", {"train": {"optim": "adafactor"}}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"memory": {"gradient_checkpointing": True}}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"model": LORA}, marks=pytest.mark.slow),
        pytest.param("internvl", {}, marks=pytest.mark.slow),
        pytest.param("gemma3", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", {}, marks=pytest.mark.slow),
        ("qwen3_5", {"memory": {"gradient_checkpointing": True}}),
    ],
)
def test_bytes_of_each_stage(family: str, sections: dict[str, Any], tmp_path: Path):
    checkpoint = build_tiny(family, tmp_path)
    config = run_config(checkpoint, **sections)
    groups = make_groups(checkpoint, [([noise_image(32, 32, seed=i)], [24, 20, 16, 8]) for i in range(2)])
    planned, found = traced(config, checkpoint, groups), measured(config, checkpoint, groups)
    for planned_step, found_step in zip(planned, found, strict=True):
        assert planned_step.keys() == found_step.keys()
        for phase, values in found_step.items():
            assert planned_step[phase] == pytest.approx(values, rel=0.01, abs=1000), phase


def test_the_passes_of_the_first_step_do_not_count_what_its_update_leaves_behind(tmp_path: Path):
    """One token is trained, so that the passes hold less than the optimizer state that the update makes."""
    checkpoint = build_tiny("qwen2_5_vl", tmp_path)
    groups = make_groups(checkpoint, [([], [1, 1])])
    first, second = trace_steps(run_config(checkpoint), str(checkpoint), groups, NUM_STEPS)
    state = first[Stage.UPDATE].after - first[Stage.UPDATE].before
    grown = [step[Stage.TRAINING].peak - step[Stage.TRAINING].before for step in (first, second)]
    assert state > 0 and grown[0] == pytest.approx(grown[1], rel=0.01)
