"""Losses, gradients, metrics and advantages against TRL's GRPOTrainer on the same inputs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor

from rl_vlm.algorithm.advantages import compute_advantages, reward_std, total_rewards
from rl_vlm.algorithm.losses import (
    Denominators,
    LossInputs,
    generator_weight,
    importance_ratio,
    old_logprobs,
    policy_loss,
)
from rl_vlm.algorithm.objective import (
    configured_loss,
    count_denominators,
    top_entropy_threshold,
    trained_completions,
)
from rl_vlm.algorithm.own_loss import check_own_loss
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.reference import Reference
from rl_vlm.types import Completion, Forward, Group, Prompt, Sample, ScoredGroup, length_mask
from tests.helpers import given_groups, trl_oracle
from tests.helpers.builders import (
    BYTE_TOKENS,
    QUESTION,
    gradient_error,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.tiny.build import build_tiny

DOCUMENTED = Path(__file__).parents[2] / "docs" / "losses.md"
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
LEVELS = ["token", "sequence"]
LENGTHS = [3, 9, 5, 7, 1, 6, 8, 4]
TRUNCATED = 2
MAX_COMPLETION_LENGTH = 12

EVERYTHING = {
    "epsilon": 0.2, "epsilon_high": 0.28, "delta": 2.0, "beta": 0.1,
    "sapo_temperature_neg": 1.3, "sapo_temperature_pos": 0.9,
}  # fmt: skip
VARIANTS = {
    "defaults": {},
    "no delta": EVERYTHING | {"delta": None},
    "KL without the ratio": EVERYTHING | {"use_bias_correction_kl": False},
    "no KL": EVERYTHING | {"beta": 0.0},
    "high-entropy tokens": EVERYTHING | {"top_entropy_quantile": 0.4},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_trainer(checkpoint, tmp_path):
    def make(rollouts=None, **settings):
        given: dict[str, Any] = {"max_completion_length": MAX_COMPLETION_LENGTH} | settings
        return trl_oracle.make_trainer(checkpoint, tmp_path, rollouts, **given)

    return make


def example_inputs(on_policy=False):
    """8 completions of unequal length, one truncated and masked, advantages of both signs, and off-policy ratios."""
    generator = torch.Generator().manual_seed(21)

    def noise(scale):
        return torch.randn(8, max(LENGTHS), generator=generator) * scale

    policy = -noise(1.0).abs() - 0.1
    mask = length_mask(LENGTHS)
    mask[TRUNCATED] = False
    return LossInputs(
        policy_logprobs_NT=policy.requires_grad_(),
        old_logprobs_NT=None if on_policy else policy.detach() + noise(0.7),
        ref_logprobs_NT=policy.detach() + noise(0.5),
        advantages_NK=torch.tensor([1.3, -0.9, 0.4, -1.6, 0.7, -0.3, 2.1, 0.0])[:, None],
        mask_NT=mask,
        entropies_NT=noise(1.0).abs(),
    )


def rows_of(inputs, rows):
    """The micro-batch of these completions, whose log-probs still lead back to `inputs`."""
    return LossInputs(
        inputs.policy_logprobs_NT[rows], inputs.old_logprobs_NT[rows], inputs.ref_logprobs_NT[rows],
        inputs.advantages_NK[rows], inputs.mask_NT[rows], inputs.entropies_NT[rows],
    )  # fmt: skip


def with_cispo_cap(loss_type, settings):
    return settings | {"loss_type": loss_type} | ({"epsilon_high": 2.5} if loss_type == "cispo" else {})


def our_loss(inputs, settings):
    algorithm = AlgorithmConfig(**settings)
    if algorithm.top_entropy_quantile < 1:
        threshold = top_entropy_threshold(inputs.entropies_NT[inputs.mask_NT], algorithm.top_entropy_quantile)
        inputs = LossInputs(**(vars(inputs) | {"entropy_threshold": threshold}))
    return configured(inputs, algorithm, Denominators(tokens=float(inputs.mask_NT.sum()), completions=8.0))


def configured(inputs, algorithm, denominators):
    """The loss and metrics of the `loss_type`, in a step with these denominators."""
    token_loss, token_weights = configured_loss(algorithm)
    return policy_loss(
        inputs, algorithm, token_loss, token_weights(inputs.mask_NT, denominators, MAX_COMPLETION_LENGTH)
    )


def gradient(loss, inputs):
    return torch.autograd.grad(loss, inputs.policy_logprobs_NT)[0]


def assert_same(ours, trls):
    torch.testing.assert_close(ours, trls, rtol=1e-5, atol=1e-7)


def assert_loss_gradient_and_metrics_agree(trainer, inputs, settings):
    ours, metrics = our_loss(inputs, settings)
    trls = trl_oracle.loss_on_logprobs(trainer, inputs, num_step_tokens=int(inputs.mask_NT.sum()))
    assert_same(ours, trls)
    assert_same(gradient(ours, inputs), gradient(trls, inputs))
    if settings.get("importance_sampling_level") == "sequence":
        return  # TRL counts masked completions as unclipped ones
    logged = trl_oracle.last_metrics(trainer)
    assert reduced(metrics) == {name: pytest.approx(logged[name], rel=1e-5) for name in metrics}


def reduced(metrics):
    """What a step of this one micro-batch logs."""
    step = StepMetrics()
    step.add_loss_metrics([metrics])
    return step.reduce(list)


def test_the_example_reaches_every_branch_of_the_losses():
    inputs = example_inputs()
    sequence = importance_ratio(inputs, "sequence").squeeze(1)
    for sign in (1, -1):
        signed = inputs.advantages_NK.squeeze(1).sign() == sign
        ratios = importance_ratio(inputs, "token")[inputs.mask_NT & signed[:, None]]
        for low, high in [(0.0, 0.8), (0.8, 1.28), (1.28, 2.0), (2.0, 2.5), (2.5, torch.inf)]:
            assert ((ratios > low) & (ratios < high)).any()
        assert (sequence[signed] < 0.8).any() and (sequence[signed] > 1.28).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_trls(make_trainer, loss_type, level):
    settings = with_cispo_cap(loss_type, EVERYTHING) | {"importance_sampling_level": level}
    assert_loss_gradient_and_metrics_agree(make_trainer(**settings), example_inputs(), settings)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_setting_has_trls_meaning(make_trainer, loss_type, variant):
    settings = with_cispo_cap(loss_type, VARIANTS[variant])
    assert_loss_gradient_and_metrics_agree(make_trainer(**settings), example_inputs(), settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_with_an_advantage_per_token_equal_trls(make_trainer, loss_type, level):
    settings = with_cispo_cap(loss_type, EVERYTHING) | {"importance_sampling_level": level}
    inputs: Any = example_inputs()
    noise = torch.randn(inputs.mask_NT.shape, generator=torch.Generator().manual_seed(23))
    inputs = replace(inputs, advantages_NK=inputs.advantages_NK + noise)
    assert_loss_gradient_and_metrics_agree(make_trainer(**settings), inputs, settings)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_loss_and_gradient_equal_trls(make_trainer, loss_type):
    settings = with_cispo_cap(loss_type, EVERYTHING)
    assert_loss_gradient_and_metrics_agree(make_trainer(**settings), example_inputs(on_policy=True), settings)


@pytest.mark.parametrize("loss_type", sorted(set(LOSS_TYPES) - {"bnpo"}))
def test_one_micro_batch_equals_trls_sum_over_two(make_trainer, loss_type):
    # TRL's bnpo divides by each micro-batch's own tokens, so that its sum depends on the cut
    settings = with_cispo_cap(loss_type, EVERYTHING)
    inputs = example_inputs()
    trainer = make_trainer(num_micro_batches=2, **settings)
    parts = [rows_of(inputs, rows) for rows in (slice(0, 4), slice(4, 8))]
    trls = sum(trl_oracle.loss_on_logprobs(trainer, part, num_step_tokens=int(inputs.mask_NT.sum())) for part in parts)
    ours, _ = our_loss(inputs, settings)
    assert_same(ours, trls)
    assert_same(gradient(ours, inputs), gradient(trls, inputs))


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_steps_of_a_window_divide_by_its_average_like_trl(make_trainer, loss_type):
    settings: dict[str, Any] = with_cispo_cap(loss_type, EVERYTHING)
    trainer = make_trainer(steps_per_generation=2, **settings)
    first: Any = example_inputs()
    second: Any = example_inputs()
    second = replace(second, mask_NT=second.mask_NT & (torch.arange(max(LENGTHS)) < 3))
    assert (first.mask_NT.sum(), second.mask_NT.sum()) == (38, 19)
    for step in (first, second):
        ours, _ = configured(step, AlgorithmConfig(**settings), Denominators(tokens=28.5, completions=8.0))
        trls = trl_oracle.loss_on_logprobs(trainer, step, num_step_tokens=38 + 19)
        assert_same(ours, trls)
        assert_same(gradient(ours, step), gradient(trls, step))
        assert abs(our_loss(step, settings)[0].item() - trls.item()) > 1e-2  # of the step's own tokens


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_that_the_documentation_writes_is_trls_dapo(make_trainer, tmp_path, level):
    (source,) = re.findall(r"```python\n(# my_losses.py\n.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    (tmp_path / "my_losses.py").write_text(source)
    settings: dict[str, Any] = EVERYTHING | {"delta": None, "importance_sampling_level": level}
    own: dict[str, Any] = settings | {"loss_type": f"{tmp_path}/my_losses.py:dapo"}
    check_own_loss(AlgorithmConfig(**own))
    inputs: Any = example_inputs()
    noise = torch.randn(inputs.mask_NT.shape, generator=torch.Generator().manual_seed(23))
    trainer = make_trainer(**settings, loss_type="dapo")
    for given in (inputs, replace(inputs, advantages_NK=inputs.advantages_NK + noise), example_inputs(on_policy=True)):
        assert_loss_gradient_and_metrics_agree(trainer, given, own)


def test_any_two_losses_differ_on_the_example():
    losses = {
        (loss_type, level): our_loss(
            example_inputs(), with_cispo_cap(loss_type, EVERYTHING) | {"importance_sampling_level": level}
        )[0].item()
        for loss_type, level in product(LOSS_TYPES, LEVELS)
    }
    same = {frozenset({("dapo", level), ("bnpo", level)}) for level in LEVELS}  # by design, see LOSS_FORMS
    for one, other in combinations(losses, 2):
        if {one, other} not in same:
            assert abs(losses[one] - losses[other]) > 1e-3, (one, other)


@pytest.fixture(scope="module")
def completion_ids(checkpoint):
    """Two groups of 4 completions of LENGTHS tokens; all but TRUNCATED end in EOS."""
    eos_token_id = AutoProcessor.from_pretrained(checkpoint).tokenizer.eos_token_id
    return [[10] * (n - 1) + [10 if i == TRUNCATED else eos_token_id] for i, n in enumerate(LENGTHS)]


def image_rows():
    """One row per completion; the two prompts' images differ in size."""
    return [
        {"prompt": [{"role": "user", "content": "Which digit is this?"}], "image": Image.new("RGB", size, "red")}
        for size in [(16, 16)] * 4 + [(32, 16)] * 4
    ]


CORRECTIONS = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
BOUNDS: dict[str, Any] = {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.5}


def mismatched_inputs(on_policy=False):
    """The example, all of it trained on, with generator log-probs on both sides of the old ones."""
    inputs = example_inputs(on_policy)
    noise = torch.randn(8, max(LENGTHS), generator=torch.Generator().manual_seed(22))
    generator = (old_logprobs(inputs) + 0.4 * noise).masked_fill(~length_mask(LENGTHS), 0.0)
    return replace(inputs, mask_NT=length_mask(LENGTHS), generator_logprobs_NT=generator)


def weights_of(inputs, **settings):
    return generator_weight(inputs, inputs.generator_logprobs_NT, AlgorithmConfig(**settings))[0]


@pytest.fixture
def make_generator_trainer(make_trainer, completion_ids):
    """A trainer that got the inputs' generator log-probs from vLLM, and the weights that it made of them."""

    def make(inputs, **settings):
        logprobs = [row[:n].tolist() for row, n in zip(inputs.generator_logprobs_NT, LENGTHS, strict=True)]
        trainer = make_trainer(trl_oracle.Rollouts(completion_ids, [[0.0]] * 8, logprobs), **settings)
        return trainer, trl_oracle.generator_weight(trainer, image_rows(), old_logprobs(inputs).detach())

    return make


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_example_has_generator_weights_within_and_beyond_both_bounds(mode):
    settings: dict[str, Any] = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 0}
    weights = weights_of(mismatched_inputs(), **settings)
    for low, high in [(0, 0.6), (0.6, 1.5), (1.5, torch.inf)]:
        assert ((weights > low) & (weights < high) & (weights != 1)).any()


@pytest.mark.parametrize(
    ("loss_type", "mode", "on_policy"),
    [
        *product(LOSS_TYPES, CORRECTIONS, [False]),
        *product(["dapo"], CORRECTIONS, [True]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in product(LOSS_TYPES, CORRECTIONS, [True])
            if each[0] != "dapo"
        ),
    ],
)
def test_loss_and_gradient_with_another_generator_equal_trls(make_generator_trainer, loss_type, mode, on_policy):
    settings = with_cispo_cap(loss_type, EVERYTHING) | BOUNDS | {"vllm_importance_sampling_mode": mode}
    inputs = mismatched_inputs(on_policy)
    trainer, weight = make_generator_trainer(inputs, **settings)
    ours, metrics = our_loss(inputs, settings)
    trls = trl_oracle.loss_on_logprobs(trainer, inputs, int(inputs.mask_NT.sum()), weight)
    assert_same(ours, trls)
    assert_same(gradient(ours, inputs), gradient(trls, inputs))

    found, logged = reduced(metrics), trl_oracle.last_metrics(trainer)
    names = [name for name in logged if name.startswith("sampling/")]
    assert len(names) == 5
    assert {name: found[name] for name in names} == {name: pytest.approx(logged[name], rel=1e-5) for name in names}


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_wrong_uses_of_the_generator_weight_would_show(mode):
    """Not at all, twice, or with a gradient of its own."""
    settings = BOUNDS | {"vllm_importance_sampling_mode": mode}
    inputs: Any = mismatched_inputs(on_policy=True)
    found = gradient(our_loss(inputs, settings)[0], inputs)

    mask, policy, weight = inputs.mask_NT, inputs.policy_logprobs_NT, weights_of(inputs, **settings)
    mismatch = torch.where(mask, policy - inputs.generator_logprobs_NT, 0.0)
    if mode.startswith("sequence"):
        mismatch = mismatch.sum(dim=1, keepdim=True)
    with_gradient = weight * (mismatch - mismatch.detach()).exp()

    def gradient_with(weight):
        losses = -inputs.advantages_NK * (policy - policy.detach()).exp()
        return gradient((losses * weight * mask).sum() / mask.sum(), inputs)

    assert_same(found, gradient_with(weight))
    for wrong in (torch.ones_like(weight), weight**2, with_gradient):
        assert (gradient_with(wrong) - found).abs().max() > 1e-3


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_equal_trls(make_trainer, completion_ids, scale_rewards):
    # the third completion has no reward at all; the second group's rewards differ in scale
    rewards = [[1.0, 0.5], [0.0, 0.25], [None, None], [1.0, 0.0], [3.0, 1.0], [3.0, -2.0], [9.0, 0.0], [3.0, 1.0]]
    weights = [1.0, 0.5]
    rollouts = trl_oracle.Rollouts(completion_ids, rewards)
    trainer = make_trainer(rollouts, scale_rewards=scale_rewards, reward_weights=weights)
    trls = trl_oracle.score_rollouts(trainer, image_rows())["advantages"]

    scores = torch.tensor([[torch.nan if score is None else score for score in row] for row in rewards]).view(2, 4, 2)
    valid = ~scores.isnan().all(dim=2)
    totals = total_rewards(scores, torch.tensor(weights), valid)
    batch_std = reward_std(totals.flatten()).item()
    assert_same(compute_advantages(totals, valid, scale_rewards, batch_std).advantages_PG.flatten(), trls)
    assert batch_std == pytest.approx(trl_oracle.last_metrics(trainer)["reward_std"])


@pytest.mark.parametrize("mask_truncated_completions", [False, True])
def test_tokens_of_the_step_equal_trls(make_trainer, completion_ids, mask_truncated_completions):
    rollouts = trl_oracle.Rollouts(completion_ids, rewards=[[0.0]] * 8)
    trainer = make_trainer(rollouts, mask_truncated_completions=mask_truncated_completions)
    trls = trl_oracle.score_rollouts(trainer, image_rows())["num_items_in_batch"].item()

    prompt = Prompt(Sample("s0", [], [], {}, ""), torch.tensor([1]), {}, {})
    completions = [
        Completion(torch.tensor(ids), torch.zeros(len(ids)), "length" if i == TRUNCATED else "stop", "")
        for i, ids in enumerate(completion_ids)
    ]
    group = ScoredGroup(
        Group("g0", prompt, completions, policy_version=0),
        scores_GF=torch.zeros(8, 1),
        rewards_G=torch.zeros(8),
        advantages_G=torch.zeros(8),
        valid_G=torch.ones(8, dtype=torch.bool),
        has_variance=False,
    )
    assert count_denominators([group], mask_truncated_completions) == Denominators(float(trls), completions=8.0)


PICTURES = [[noise_image(16, 24, seed=1)], [noise_image(32, 16, seed=2), noise_image(24, 24, seed=3)]]
"""Images of each prompt."""
REWARDS = [1.0, 0.0, 0.25, 0.5, 3.0, -1.0, 0.5, 0.0]


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def sharp(request, tmp_path_factory):
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def random_completions(checkpoint):
    """Token ids of LENGTHS; all but TRUNCATED end in EOS."""
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(BYTE_TOKENS.start, BYTE_TOKENS.stop, (n,), generator=generator) for n in LENGTHS]
    for i in set(range(len(LENGTHS))) - {TRUNCATED}:
        ids[i][-1] = AutoProcessor.from_pretrained(checkpoint).tokenizer.eos_token_id
    return ids


def scored_groups(checkpoint, completion_ids, rewards=REWARDS):
    rewards = torch.tensor(rewards).view(2, 4)
    valid = torch.ones(2, 4, dtype=torch.bool)
    found = compute_advantages(rewards, valid, "group")
    completions = [
        Completion(ids, torch.zeros(len(ids)), "length" if i == TRUNCATED else "stop", "")
        for i, ids in enumerate(completion_ids)
    ]
    groups = [
        Group(f"g{p}", make_prompt(checkpoint, images), completions[4 * p : 4 * p + 4], policy_version=0)
        for p, images in enumerate(PICTURES)
    ]
    return [
        ScoredGroup(
            group, rewards[p, :, None], rewards[p], found.advantages_PG[p], valid[p], bool(found.has_variance_P[p])
        )
        for p, group in enumerate(groups)
    ]


def trls_loss(
    checkpoint: Path,
    tmp_path: Path,
    completion_ids: Sequence[Tensor],
    rewards: Sequence[float],
    old: Tensor,
    ref: Tensor,
    settings: dict[str, Any],
) -> tuple[Tensor, Any]:
    """TRL's loss on these completions, after its backward pass, and the model with the gradients."""
    rollouts = trl_oracle.Rollouts([ids.tolist() for ids in completion_ids], rewards=[[reward] for reward in rewards])
    trainer = trl_oracle.make_trainer(
        checkpoint, tmp_path, rollouts, max_completion_length=MAX_COMPLETION_LENGTH, **settings
    )
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "images": images} for images in PICTURES for _ in range(4)
    ]
    loss = trl_oracle.loss_on_rollouts(trainer, rows, old, ref)
    loss.backward()
    return loss, trainer.model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_parameter_gradients_of_rollouts_with_images_equal_trls(sharp, tmp_path, loss_type, level):
    settings: dict[str, Any] = with_cispo_cap(loss_type, EVERYTHING)
    settings |= {"importance_sampling_level": level, "mask_truncated_completions": True}
    completion_ids = random_completions(sharp)
    groups = scored_groups(sharp, completion_ids)
    policy = make_policy(sharp)

    scores = policy(Forward(whole(groups, shared=True)))
    noise = torch.randn(2, 8, max(LENGTHS), generator=torch.Generator().manual_seed(5))
    old, ref = scores.logprobs_NT.detach() + torch.tensor([0.7, 0.5])[:, None, None] * noise
    inputs = LossInputs(
        policy_logprobs_NT=scores.logprobs_NT,
        old_logprobs_NT=old,
        ref_logprobs_NT=ref,
        advantages_NK=torch.cat([scored.advantages_G for scored in groups])[:, None],
        mask_NT=length_mask(LENGTHS) & torch.cat([trained_completions(g, True) for g in groups])[:, None],
        entropies_NT=scores.entropies_NT,
    )
    denominators = count_denominators(groups, mask_truncated_completions=True)
    ours, _ = configured(inputs, AlgorithmConfig(**settings), denominators)
    ours.backward()

    trls, trained = trls_loss(sharp, tmp_path, completion_ids, REWARDS, old, ref, settings)
    assert_same(ours, trls)
    assert gradient_error(take_gradients(policy.transformer), take_gradients(trained)) <= 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_entropy_threshold_of_a_step_with_a_group_without_variance_is_trls(sharp, tmp_path, beta):
    settings: dict[str, Any] = {"top_entropy_quantile": 0.4, "beta": beta, "loss_type": "dapo"}
    rewards = [1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
    completion_ids = random_completions(sharp)
    groups = scored_groups(sharp, completion_ids, rewards)
    assert [group.has_variance for group in groups] == [True, False]
    policy = make_policy(sharp)
    old = policy(Forward(whole(groups, shared=True))).logprobs_NT.detach()
    ref = old + 0.5 * torch.randn(old.shape, generator=torch.Generator().manual_seed(5))
    for p, group in enumerate(groups):
        group.ref_logprobs = {i: ref[4 * p + i, : LENGTHS[4 * p + i]] for i in range(4)} if beta else {}
    reference = Reference(policy, make_policy(sharp)) if beta else None
    ours = given_groups.accumulate(given_groups.make_trainer(policy, groups, reference=reference, **settings), groups)

    trls, trained = trls_loss(sharp, tmp_path, completion_ids, rewards, old, ref, settings)
    assert_same(ours, trls.detach())
    assert gradient_error(take_gradients(policy.transformer), take_gradients(trained)) <= 1e-5
