"""Every family: training passes against the model's own forward, and rollouts against its own `generate`."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rl_vlm.data.sampler import Draw
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.layout import ForwardInputs
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.partial import InFlight, roll_on
from rl_vlm.types import Forward, Group, Observation, Prompt, RolloutRequest, Sampling, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_observation,
    make_policy,
    make_prompt,
    noise_image,
    sharp_checkpoint,
    whole,
)
from tests.helpers.cut_groups import cut, cut_gradients
from tests.helpers.family_parity import (
    CASES,
    DENSE_ALONE,
    FP32_ROUNDING,
    IMAGE_TURNS,
    ONE_IMAGE,
    TEXT_TURNS,
    Parity,
    case_groups,
    cases,
    in_fp64,
    measure,
    observed_text,
    scores,
    shares,
    stock_scores,
)
from tests.helpers.stock import generate_with_transformers, stock_logprobs
from tests.helpers.tiers import FAST_FAMILIES, families_in_tiers, in_tiers, short_test_of_families
from tests.helpers.wrong_rows import WRONG_ROWS, WRONG_TURNS, another_observed_image, effect
from tests.tiny.build import ALL_FAMILIES, TINY_FAMILIES

VARIANTS: dict[str, dict[str, Any]] = {
    "frozen vision, checkpointing": {"freeze_vision_tower": True, "gradient_checkpointing": True},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA, checkpointing": {"use_peft": True, "lora_r": 4, "gradient_checkpointing": True},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the families of its tier. One short test has every family in `make test-ci`, and one has few."""
    if "family" in metafunc.fixturenames:
        families = families_in_tiers(TINY_FAMILIES)
        if metafunc.function is test_generator_logprobs_are_those_of_the_models_own_forward:
            families = short_test_of_families(TINY_FAMILIES)
        elif metafunc.function is test_trajectories_are_exact_for_each_way_to_train:
            families = in_tiers(sorted(TINY_FAMILIES), fast=(), ci=FAST_FAMILIES)
        metafunc.parametrize("family", families, scope="module")


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    """Every weight is trained."""
    return make_policy(checkpoint)


def test_every_family_of_the_table_is_built_here() -> None:
    forms = {"llava_pixtral": "llava", "paligemma2": "paligemma"}
    model_types = {forms.get(name, name.split("_bidirectional")[0].removesuffix("_moe")) for name in ALL_FAMILIES}
    model_types |= {name for name in ALL_FAMILIES if name in FAMILIES}
    assert {name.removesuffix("_moe") for name in FAMILIES} <= model_types
    assert FAMILIES.keys() <= model_types


def test_training_passes_are_those_of_the_models_own_forward(family: str, checkpoint: Path) -> None:
    measured = measure(checkpoint, cases(family))
    bound = FP32_ROUNDING.get(family, 1e-5)
    for parity, exact in ((measured.dense, measured.dense_fp64), (measured.shared, measured.shared_fp64)):
        if parity is not None and exact is not None:
            assert parity.logprobs <= 1e-5
            assert parity.gradients <= bound
            assert exact.worst <= 1e-9


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_equals_dense_for_each_way_to_train(family: str, checkpoint: Path, variant: str) -> None:
    policy = make_policy(checkpoint, **VARIANTS[variant])
    several, later = ("several prompts", "one image"), (IMAGE_TURNS, TEXT_TURNS)
    names = [next(filter(cases(family).__contains__, some)) for some in (several, later)]
    groups = case_groups(checkpoint, names[0])
    if family != "mllama":  # it has one prompt in a row
        groups += case_groups(checkpoint, names[1])
    dense = scores(policy, groups, shared=False)
    expected = dense if shares(policy) else stock_scores(policy, groups)
    assert any("lora_" in name for name in dense.gradients) == variant.startswith("LoRA")
    trains_vision = any(
        name.removeprefix("model.").startswith(policy.family.vision_prefixes) for name in dense.gradients
    )
    assert trains_vision == (variant == "checkpointing")
    parity = Parity.of(scores(policy, groups, shares(policy)), expected)
    assert parity.logprobs <= 1e-5
    assert parity.gradients <= FP32_ROUNDING.get(family, 1e-5)


@pytest.mark.parametrize("variant", ["every weight", *VARIANTS])
def test_trajectories_are_exact_for_each_way_to_train(family: str, checkpoint: Path, variant: str) -> None:
    """In fp64, of several prompts in one row, and of groups that are cut into micro-batches."""
    policy = make_policy(checkpoint, **VARIANTS.get(variant, {}))
    with in_fp64(policy):
        groups = case_groups(checkpoint, IMAGE_TURNS if IMAGE_TURNS in cases(family) else TEXT_TURNS, torch.float64)
        if len(groups) == 1 and family != "mllama":  # it has one prompt in a row
            groups += case_groups(checkpoint, "several prompts", torch.float64)
        expected = stock_scores(policy, groups)
        assert Parity.of(scores(policy, groups, shares(policy)), expected).worst <= 1e-9
        assert Parity.of(scores(policy, groups, shared=False), expected).worst <= 1e-9
        batches = cut(policy, groups)
        assert len(batches) > len(groups)
        assert gradient_error(cut_gradients(policy, groups, batches), expected.gradients) <= 1e-9


@pytest.mark.parametrize("change", WRONG_TURNS)
def test_what_must_not_happen_in_turns_would_show(
    family: str, checkpoint: Path, policy: Policy, change: Callable[[ForwardInputs], ForwardInputs]
) -> None:
    if family in DENSE_ALONE:
        pytest.skip("it shares no prefixes")
    case = IMAGE_TURNS if IMAGE_TURNS in cases(family) else TEXT_TURNS
    if case == TEXT_TURNS and change is another_observed_image:
        pytest.skip("its observations have no image")
    assert effect(policy, case_groups(checkpoint, case)[:1], change) >= 0.01


@pytest.mark.parametrize("change", WRONG_ROWS)
def test_what_must_not_happen_would_show(
    family: str, checkpoint: Path, policy: Policy, change: Callable[[ForwardInputs], ForwardInputs]
) -> None:
    if family in DENSE_ALONE:
        pytest.skip("it shares no prefixes")
    assert effect(policy, case_groups(checkpoint, "one image"), change) >= 0.01


@torch.no_grad()
@pytest.mark.parametrize(("sparse", "select_all"), [
    ("llama4", {"attention_chunk_size": 512}),
    ("minimax_m3_vl", {"index_topk_blocks": 512}),
    ("qwen4_exp", {"indexer_budget": 512}),
])  # fmt: skip
@pytest.mark.slow
def test_layers_that_select_tokens_keep_transformers_attention(
    sparse: str, select_all: dict[str, int], tmp_path: Path
) -> None:
    """Both indexers are used only for the names of transformers' attention, so a forward of ours would not show it."""
    policy = make_policy(sharp_checkpoint(sparse, tmp_path / "sparse"))
    text = policy.transformer.config.get_text_config()
    assert text._attn_implementation == "sdpa"
    groups = case_groups(tmp_path / "sparse", "one image")
    found = scores_without_gradients(policy, groups)
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    config["text_config"] |= select_all
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(config))
    assert (scores_without_gradients(make_policy(tmp_path / "sparse"), groups) - found).abs().max() >= 0.01


def scores_without_gradients(policy: Policy, groups: list[ScoredGroup]) -> Tensor:
    return policy(Forward(whole(groups, shared=False))).logprobs_NT


def prompts_of(family: str, checkpoint: Path) -> list[Prompt]:
    return [group.group.prompt for case in cases(family) if case in CASES for group in case_groups(checkpoint, case)]


def make_engine(policy: Policy, checkpoint: Path) -> HFEngine:
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(checkpoint), max_num_seqs=64)
    engine.stop_token_ids = list(range(40, 80))  # a tenth of the vocabulary: completions of several lengths
    return engine


def test_rollouts_are_those_of_the_models_own_generate(family: str, checkpoint: Path, policy: Policy) -> None:
    engine, prompts = make_engine(policy, checkpoint), prompts_of(family, checkpoint)
    requests = [RolloutRequest(str(i), prompt) for i, prompt in enumerate(prompts)]
    greedy = Sampling(num_generations=2, max_completion_length=8, temperature=0.0, seed=0)
    groups = engine.generate(requests, greedy)
    banned = policy.family.banned_token_ids(policy.transformer.config)
    policy.eval()
    for group in groups:
        expected = generate_with_transformers(
            policy.transformer, group.prompt, banned=banned, stops=engine.stop_token_ids, max_new_tokens=8
        )
        assert [c.token_ids.tolist() for c in group.completions] == [expected, expected]
    policy.train()
    assert len({tuple(group.completions[0].token_ids.tolist()) for group in groups}) > 1


@torch.no_grad()
def test_generator_logprobs_are_those_of_the_models_own_forward(family: str, checkpoint: Path, policy: Policy) -> None:
    engine, prompts = make_engine(policy, checkpoint), prompts_of(family, checkpoint)
    requests = [RolloutRequest(str(i), prompt) for i, prompt in enumerate(prompts)]
    groups = engine.generate(requests, Sampling(num_generations=4, max_completion_length=8, temperature=1.0, seed=0))
    assert len({len(completion.token_ids) for group in groups for completion in group.completions}) > 1
    policy.train()
    for group in groups[:2]:
        for completion in group.completions:
            expected = stock_logprobs(
                policy.transformer, policy.family, group.prompt, completion, banned=engine.banned_token_ids
            )
            assert (completion.generator_logprobs - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_turns_after_observations_have_the_logprobs_of_the_models_own_forward(
    family: str, checkpoint: Path, policy: Policy
) -> None:
    """Rows of unlike length, in batches of three; every other one sees an image if the family can have one."""
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(checkpoint), max_num_seqs=3)
    engine.stop_token_ids = list(range(40, 120))
    image = IMAGE_TURNS in cases(family)
    seen = [*observed_turns(checkpoint, image), None]
    sampling = Sampling(num_generations=6, max_completion_length=2000, temperature=1.0, seed=0, max_rollout_tokens=4)
    (group,) = engine.generate([RolloutRequest("0", make_prompt(checkpoint, ONE_IMAGE))], sampling)
    for _ in range(2):
        waiting = [
            replace(completion, finish_reason="paused" if pending else "stop", pending=pending)
            for completion, pending in zip(group.completions, [*seen, *seen], strict=True)
        ]
        before = [completion.token_ids.tolist() for completion in waiting]
        (group,) = engine.generate([RolloutRequest("0", group.prompt, replace(group, completions=waiting))], sampling)
        lengths = {len(completion.token_ids) for completion in group.completions}
        for i, (completion, earlier) in enumerate(zip(group.completions, before, strict=True)):
            assert completion.token_ids.tolist()[: len(earlier)] == earlier
            assert (len(completion.token_ids) > len(earlier)) == (i % 3 != 2)
    assert len(lengths) > 2
    policy.train()
    for completion in group.completions:
        expected = stock_logprobs(
            policy.transformer, policy.family, group.prompt, completion, banned=engine.banned_token_ids
        )
        assert (completion.generator_logprobs - expected).abs().max() <= 2e-5


def observed_turns(checkpoint: Path, with_image: bool) -> list[Observation]:
    """A text, and an image with a text or a longer text."""
    longer = make_observation(checkpoint, [noise_image(32, 24, seed=5)], "Look.") if with_image else observed_text(9, 7)
    return [observed_text(3, seed=6), longer]


@torch.no_grad()
def test_paused_completions_go_on_as_if_they_had_not_been(family: str, checkpoint: Path, policy: Policy) -> None:
    engine, prompts = make_engine(policy, checkpoint), prompts_of(family, checkpoint)
    new = [InFlight(Draw(0, i), RolloutRequest(str(i), prompt)) for i, prompt in enumerate(prompts)]
    at_once = Sampling(num_generations=4, max_completion_length=8, temperature=1.0, seed=0)
    rollouts: list[list[int]] = []

    def generate(requests: list[RolloutRequest]) -> list[Group]:
        rollouts.append([request.num_paused_tokens for request in requests])
        return engine.generate(requests, replace(at_once, max_rollout_tokens=3))

    finished, _ = roll_on(new, len(new), generate)
    assert [set(lengths) for lengths in rollouts] == [{0}, {3}, {6}]
    for found, expected in zip(finished.values(), engine.generate([one.request for one in new], at_once), strict=True):
        assert found.group_id == expected.group_id
        for ours, at_end in zip(found.completions, expected.completions, strict=True):
            assert (ours.token_ids.tolist(), ours.finish_reason) == (at_end.token_ids.tolist(), at_end.finish_reason)
            assert (ours.generator_logprobs - at_end.generator_logprobs).abs().max() <= 1e-5
            assert ours.text == at_end.text
