"""Contexts of one completion in several micro-batches: the step's loss, gradients and metrics are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.policy import Policy
from rl_vlm.passes.micro_batches import batch_tokens, make_micro_batches
from rl_vlm.stages import Stage
from rl_vlm.types import Context, MicroBatch, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_observation,
    make_policy,
    make_prompt,
    make_trajectories,
    noise_image,
    sharp_checkpoint,
    take_gradients,
)
from tests.helpers.family_parity import in_fp64
from tests.helpers.given_groups import WHOLE, make_budget, make_trainer, objective_of

CUT = 80
"""A token budget that holds one context of a completion."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def edited_group(checkpoint: Path) -> ScoredGroup:
    """Completions of three contexts, which keep one or two images, and of a single turn."""
    again = make_observation(checkpoint, [], "no")  # turns that an edited context reads again, without their images
    prompt = make_prompt(checkpoint, [noise_image(24, 16, seed=1)], "Go.")
    first, second, third, other = (
        make_observation(checkpoint, [noise_image(16, 16, seed)], "Look.") for seed in (2, 3, 4, 5)
    )
    some = [
        [
            Context((2, first, 3)),
            Context((again, first, 2, second, 2)),
            Context((again, second, 2, third, 4)),
        ],
        [Context((4,))],
        [Context((1, other, 3)), Context((other, 2))],
    ]
    return make_trajectories(prompt, some)


def step(
    policy: Policy, checkpoint: Path, budget: int, is_first: bool, **settings: Any
) -> tuple[float, dict[str, Tensor], dict[str, Any], ScoredGroup, list[MicroBatch]]:
    """Return the loss of a step on the group, its gradients and metrics, and the micro-batches that hold it."""
    group, generator = edited_group(checkpoint), torch.Generator().manual_seed(0)
    if not is_first:
        lengths = [len(completion.token_ids) for completion in group.group.completions]
        group.old_logprobs.update({i: -5 * torch.rand(n, generator=generator) for i, n in enumerate(lengths)})
    trainer = make_trainer(policy, [group], micro_batch_tokens=budget, max_completion_length=200, **settings)
    objective = objective_of(trainer, [group])
    policy.start_step()
    loss, found = trainer.passes.gradients(objective, keeps_logprobs=is_first)
    batches = [work.forward.batch for work in trainer.passes.training_schedule(objective)]
    return float(loss), take_gradients(policy), metrics_of(found), group, batches


def metrics_of(found: StepMetrics) -> dict[str, Any]:
    return {name: value for name, value in found.means.items() if not name.startswith("balance/")}


@pytest.mark.parametrize("sharing", ["shared", "dense"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("is_first", "settings"),
    [
        (True, {}),
        (False, {"loss_type": "grpo"}),
        (False, {"loss_type": "dr_grpo", "epsilon": 5.0}),
        (False, {"importance_sampling_level": "sequence", "epsilon": 5.0}),
        (False, {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 5.0}),
    ],
    ids=["dapo", "grpo", "dr_grpo", "GSPO", "GSPO, grpo"],
)
def test_a_step_is_equal_however_its_completions_are_cut(
    is_first: bool, settings: dict[str, Any], frozen: bool, sharing: str, checkpoint: Path
) -> None:
    settings = settings | {"prefix_sharing": sharing, "num_generations": 3}
    policy = make_policy(checkpoint, freeze_vision_tower=frozen)
    assert_equal_steps(policy, checkpoint, is_first, settings, 5e-6)
    with in_fp64(policy):
        assert_equal_steps(policy, checkpoint, is_first, settings, 1e-12)


def assert_equal_steps(
    policy: Policy, checkpoint: Path, is_first: bool, settings: dict[str, Any], rounding: float
) -> None:
    loss, gradients, metrics, group, batches = step(policy, checkpoint, WHOLE, is_first, **settings)
    assert [batch.cuts_completions for batch in batches] == [False]
    found, found_gradients, found_metrics, cut_group, cut = step(policy, checkpoint, CUT, is_first, **settings)
    assert sum(batch.cuts_completions for batch in cut) >= 3
    assert found == pytest.approx(loss, abs=1e-6)
    assert gradient_error(found_gradients, gradients) <= rounding
    assert found_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert found_metrics[name] == pytest.approx(value, abs=1e-5), name
    for member, values in group.old_logprobs.items():
        assert (cut_group.old_logprobs[member] - values).abs().max() <= 1e-5


def test_gspo_needs_one_more_forward_only_where_completions_are_cut(checkpoint: Path) -> None:
    policy = make_policy(checkpoint, freeze_vision_tower=True)
    forwards = {}
    for name, budget, is_first in (("whole", WHOLE, False), ("first", CUT, True), ("cut", CUT, False)):
        *_, batches = step(policy, checkpoint, budget, is_first, importance_sampling_level="sequence")
        forwards[name] = policy.counters["shared_forwards"] - len(batches)
        if name == "cut":
            assert forwards[name] == sum(batch.cuts_completions for batch in batches) > 0
    assert forwards["whole"] == forwards["first"] == 0


def test_a_tower_runs_twice_on_an_image_that_two_micro_batches_need(checkpoint: Path) -> None:
    """Without gradients and with them; and once on the image that one micro-batch needs."""
    policy = make_policy(checkpoint)
    *_, group, batches = step(policy, checkpoint, CUT, True, prefix_sharing="shared")
    apart = {each.digest for batch in batches for subgroup in batch.subgroups for each in subgroup.apart}
    first, _, _, second, *_ = group.group.completions[0].observations
    other, _ = group.group.completions[2].observations
    assert apart == {group.group.prompt.digest, first.digest, second.digest, other.digest}
    assert policy.counters["vision_forwards"] == 2 * 4 + 1


def test_log_probs_without_gradients_are_those_of_whole_completions(checkpoint: Path) -> None:
    policy, found = make_policy(checkpoint), []
    for budget in (WHOLE, 100):
        group = edited_group(checkpoint)
        batches = make_micro_batches([group], budget, "shared", make_budget(policy).price)
        trainer = make_trainer(policy, [group], micro_batch_tokens=budget, prefix_sharing="shared")
        for batch, output in trainer.passes.outputs(Stage.OLD_LOGPROBS, policy, [group]):
            store_logprobs(batch, output.logprobs_NT, Stage.OLD_LOGPROBS)
        found.append(torch.cat([group.old_logprobs[i] for i in range(3)]))
        assert all(batch_tokens(b, make_budget(policy).price) <= budget for b in batches)
    assert (found[0] - found[1]).abs().max() <= 1e-5
