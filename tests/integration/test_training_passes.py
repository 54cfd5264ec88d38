"""The passes of a step over given groups: which groups they train on, and what each backward is given."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.ddp import DDP
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.model.vision import idle_sample
from rl_vlm.rollout.balance import cost_of_groups
from rl_vlm.stages import Stage
from rl_vlm.types import Forward, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_group,
    make_groups,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.helpers.given_groups import CPU, WHOLE, accumulate, make_budget, make_trainer, objective_of
from tests.helpers.stock import stock_logprobs
from tests.tiny.build import build_tiny

IMAGE, TWO_IMAGES = [noise_image(32, 24, seed=1)], [noise_image(16, 24, seed=2), noise_image(24, 32, seed=3)]
SHAPES = [(IMAGE, [5, 1, 9, 3]), ([], [6, 2, 4]), (TWO_IMAGES, [3, 7]), ([], [2, 5]), (IMAGE, [4, 4])]
WITHOUT_VARIANCE = (3, 4)
VISION_ALONE: dict[str, dict[str, Any]] = {
    "projector": {"trainable_modules": ["projector"]},
    "tower": {"trainable_modules": ["vision_tower"]},
    "LoRA on the tower": {
        "use_peft": True, "lora_r": 4, "lora_target_modules": r".*\.visual\..*(qkv|proj)", "lora_exclude_modules": [],
    },
}  # fmt: skip
CUT = 60
"""A token budget that cuts groups with images."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture
def groups(checkpoint: Path) -> list[ScoredGroup]:
    made = make_groups(checkpoint, SHAPES)
    for i in WITHOUT_VARIANCE:
        made[i].advantages_G.zero_()
        made[i].has_variance = False
    return made


def plain_gradients(policy: Policy, groups: Sequence[ScoredGroup], beta: float) -> dict[str, Tensor]:
    """Of a loss over all groups by the model's own forward of each completion, with every weight trained."""
    policy.requires_grad_(True)
    terms = []
    for scored in groups:
        for i, completion in enumerate(scored.group.completions):
            logprobs = stock_logprobs(policy.transformer, policy.family, scored.group.prompt, completion)
            ratio = (logprobs - logprobs.detach()).exp()
            mismatch = scored.ref_logprobs.get(i, logprobs.detach()) - logprobs
            kl = (mismatch.exp() - mismatch - 1) * ratio
            terms.append((-scored.advantages_G[i] * ratio + beta * kl).sum())
    num_tokens = sum(len(c.token_ids) for scored in groups for c in scored.group.completions)
    (torch.stack(terms).sum() / num_tokens).backward()
    return take_gradients(policy)


@pytest.mark.parametrize("budget", [WHOLE, CUT])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("part", VISION_ALONE)
def test_a_part_of_the_vision_side_gets_the_gradient_of_the_whole_loss(
    part: str, beta: float, budget: int, checkpoint: Path, groups: list[ScoredGroup]
) -> None:
    policy = make_policy(checkpoint, **VISION_ALONE[part])
    reference = Reference(policy, make_policy(checkpoint).requires_grad_(False)) if beta else None
    for scored in groups if beta else []:
        lengths = [len(completion.token_ids) for completion in scored.group.completions]
        scored.ref_logprobs = {i: torch.full((length,), -2.0) for i, length in enumerate(lengths)}
    trainer = make_trainer(policy, groups, reference=reference, beta=beta, micro_batch_tokens=budget)
    accumulate(trainer, groups)
    found = take_gradients(policy)
    objective = objective_of(trainer, groups)
    trained = [0, 2, 4] if beta else [0, 2]  # those with images, and without variance if there is a KL term
    assert [groups.index(group) for group in objective.contributing] == trained
    cost = cost_of_groups(policy, make_budget(policy).price, "auto", beta > 0)
    assert [i for i, group in enumerate(groups) if cost(group)] == trained
    dense = [len(groups[i].group.prompt.token_ids) * len(SHAPES[i][1]) + sum(SHAPES[i][1]) for i in trained]
    assert policy.counters["dense_tokens"] == sum(dense)
    expected = plain_gradients(policy, groups, beta)
    assert found and gradient_error(found, {name: expected[name] for name in found}) <= 1e-5


def test_a_step_of_text_alone_makes_no_update_if_a_part_of_the_vision_side_is_trained(
    checkpoint: Path, groups: list[ScoredGroup]
) -> None:
    texts = [groups[1], groups[3]]
    for part, num_updates in (("projector", 0), ("language_model", 1)):
        policy = make_policy(checkpoint, trainable_modules=part)
        trainer = make_trainer(policy, texts)
        metrics = StepMetrics()
        trainer.update(accumulate(trainer, texts), objective_of(trainer, texts).contributing, metrics)
        assert trainer.progress.policy_version == num_updates
        assert metrics.means["skipped_updates/no_variance"] == [1.0 - num_updates, 1]


def test_text_does_not_use_layers_that_cross_attend_to_images(tmp_path: Path) -> None:
    checkpoint = build_tiny("mllama", tmp_path)
    image, text = (make_prompt(checkpoint, images) for images in (IMAGE, []))
    crossing = make_policy(checkpoint).transformer.config.get_text_config().cross_attention_layers
    for wanted, trains_text in ((rf".*layers\.{crossing[0]}\.mlp", False), (r".*layers\.0\.mlp", True)):
        policy = make_policy(checkpoint, trainable_modules=wanted)
        assert (policy.trains_on([text, image]), policy.trains_on([text])) == (True, trains_text)
        logprobs = policy(Forward(whole([make_group(text, [3])], shared=False))).logprobs_NT
        assert logprobs.requires_grad == trains_text


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_entropy_threshold_is_that_of_the_trained_tokens_of_all_groups(
    beta: float, checkpoint: Path, groups: list[ScoredGroup]
) -> None:
    """Also of those without variance, and of those that reach no trained weight."""
    completions = groups[0].group.completions
    completions[0], faulted = replace(completions[0], finish_reason="length"), 1
    groups[2].valid_G[faulted] = False
    policy = make_policy(checkpoint, trainable_modules="projector")
    entropies = policy(Forward(whole(groups, shared=False))).entropies_NT
    lengths = [n for _, some in SHAPES for n in some]
    left_out = {0, 4 + 3 + faulted}
    counted = torch.cat(
        [row[:n] for i, (row, n) in enumerate(zip(entropies, lengths, strict=True)) if i not in left_out]
    )
    reference = Reference(policy, make_policy(checkpoint)) if beta else None
    settings = {"top_entropy_quantile": 0.4, "mask_truncated_completions": True, "micro_batch_tokens": CUT}
    trainer = make_trainer(policy, groups, reference=reference, beta=beta, **settings)
    threshold = objective_of(trainer, groups).entropy_threshold
    assert threshold is not None
    assert ((counted >= threshold) == (counted >= counted.quantile(0.6))).all()


class Averaging(DDP):
    """Stands for a strategy that averages gradients over two ranks."""

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        super().backward(loss * (2 if is_share else 1))


def test_gradients_that_are_averaged_are_shares_once(checkpoint: Path, groups: list[ScoredGroup]) -> None:
    """The backward of a tower that runs apart has the factor from the gradients of the features."""
    policy = make_policy(checkpoint)
    found = []
    for strategy in (DDP(Collectives(CPU), 0.0), Averaging(Collectives(CPU), 0.0)):
        accumulate(make_trainer(policy, groups, strategy, micro_batch_tokens=CUT), groups)
        found.append(take_gradients(policy))
    alone, averaged = found
    assert gradient_error(averaged, {name: 2 * gradient for name, gradient in alone.items()}) <= 1e-6


class Noting(DDP):
    """Stands for ZeRO. Notes the weights to which each backward gives a gradient, by micro-batch."""

    def __init__(self) -> None:
        super().__init__(Collectives(CPU), 0.0)
        self.is_sharded = self.needs_all_gradients = True

    def prepare(self, policy: Any, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        self.micro_batches: list[list[set[str]]] = []
        for name, parameter in policy.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.micro_batches[-1][-1].add(name))
        return super().prepare(policy, optimizer)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        self.micro_batches.append([])
        return super().accumulating(last)

    def backward(self, loss: Tensor, is_share: bool = True) -> None:
        self.micro_batches[-1].append(set())
        super().backward(loss, is_share)


@pytest.mark.parametrize("text_alone", [False, True])
def test_the_first_and_the_last_backward_of_zero_reach_every_weight(
    text_alone: bool, checkpoint: Path, groups: list[ScoredGroup]
) -> None:
    """DeepSpeed keeps old sums of a weight that has no gradient there. The last run of a tower is apart from rows."""
    policy = make_policy(checkpoint)
    policy.vision.idle_prompt = make_prompt(checkpoint, idle_sample().images, ".")
    strategy, given = Noting(), [groups[1] if text_alone else groups[0]]
    accumulate(make_trainer(policy, given, strategy, micro_batch_tokens=CUT), given)
    ran_apart = any(len(backwards) > 1 for backwards in strategy.micro_batches)
    assert ran_apart != text_alone
    for backwards in (strategy.micro_batches[0][0], strategy.micro_batches[-1][-1]):
        assert backwards == {name for name, _ in policy.named_parameters()}


class SecondOfTwo(Collectives):
    """A rank beside another one, which has a group to train on."""

    def max(self, values: Sequence[int]) -> list[int]:
        return [max(value, 1) for value in values]


def test_a_rank_without_groups_to_train_on_updates_with_the_others(
    checkpoint: Path, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(checkpoint)
    idle = [groups[i] for i in WITHOUT_VARIANCE]
    trainer = make_trainer(policy, idle, ranks=SecondOfTwo(CPU))
    updates: list[str] = []
    monkeypatch.setattr(trainer.optimizer.torch_optimizer, "step", lambda: updates.append("update"))
    metrics = StepMetrics()
    trainer.update(torch.zeros(()), objective_of(trainer, idle).contributing, metrics)
    assert updates == ["update"]
    assert trainer.progress.policy_version == 1
    assert metrics.means["skipped_updates/no_variance"] == [0.0, 1]


def test_the_counters_of_a_reference_that_runs_out_of_memory_are_those_of_its_last_pass(
    checkpoint: Path, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, frozen = make_policy(checkpoint), make_policy(checkpoint).requires_grad_(False).eval()
    reference = Reference(policy, frozen)
    trainer = make_trainer(policy, groups, reference=reference, beta=0.1, micro_batch_tokens=CUT)
    forward, sizes = Policy.forward, []

    def fail_in_the_second(model: Policy, work: Any, *arguments: Any) -> Any:
        sizes.append(len(work.batch.completions))
        if len(sizes) == 2:
            assert sizes[1] > 1  # can be split
            raise torch.OutOfMemoryError("Tried to allocate 1 byte")
        return forward(model, work, *arguments)

    monkeypatch.setattr(Policy, "forward", fail_in_the_second)
    trainer.add_logprobs(Stage.REF_LOGPROBS, reference, groups, StepMetrics())
    assert trainer.passes.recovery.events == {Stage.REF_LOGPROBS: 1}
    budget = trainer.passes.recovery.budget.tokens
    assert budget < CUT
    found = dict(frozen.counters)
    trainer.start_step()
    again = make_trainer(policy, groups, reference=reference, beta=0.1, micro_batch_tokens=budget)
    again.add_logprobs(Stage.REF_LOGPROBS, reference, groups, StepMetrics())
    assert found == dict(frozen.counters)
    assert policy.counters == {}
