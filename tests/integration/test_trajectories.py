"""Trajectories: what must not happen in a row with observations would show. `test_families` holds what must."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from rl_vlm.errors import ModelError
from rl_vlm.model import policy as policy_module
from rl_vlm.model.layout import ForwardInputs, shared_inputs
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.model.vision import num_patches
from rl_vlm.types import Completion, Context, Forward, Observation, ScoredGroup
from tests.helpers.builders import (
    gradient_error,
    make_observation,
    make_policy,
    make_prompt,
    make_trajectories,
    noise_image,
    sharp_checkpoint,
    whole,
)
from tests.helpers.family_parity import scores, stock_scores

FAMILIES = ["qwen2_5_vl", "gemma3"]
"""Positions in three dimensions; images that see themselves in both directions."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def policy(checkpoint: Path) -> Policy:
    return make_policy(checkpoint)


def group_with(checkpoint: Path, first: int, second: int) -> ScoredGroup:
    """Two completions, each of which sees an image of the prompt's size after its first turn, by seeds."""
    prompt = make_prompt(checkpoint, [noise_image(32, 24, seed=1)])
    seen = [make_observation(checkpoint, [noise_image(32, 24, seed)], "Look.") for seed in (first, second)]
    return make_trajectories(prompt, [[Context((2, seen[0], 4))], [Context((3, seen[1], 5))]])


def logprobs(policy: Policy, group: ScoredGroup, shared: bool = True) -> Tensor:
    return policy(Forward(whole([group], shared))).logprobs_NT.detach()


def with_completion(group: ScoredGroup, completion: Completion) -> ScoredGroup:
    return replace(group, group=replace(group.group, completions=[completion]))


def positions_go_on(rows: ForwardInputs) -> ForwardInputs:
    """Every token after the prompt has the position after the token before it, images included."""
    positions, layout = rows.kwargs["position_ids"].clone(), rows.layout
    assert layout is not None
    later = layout.row_part > 0
    positions[..., later] = positions[..., ~later].max() + 1 + layout.row_logical[later] - layout.num_prefix_tokens
    return replace(rows, kwargs=rows.kwargs | {"position_ids": positions})


def kinds_at_logical_positions(rows: ForwardInputs) -> ForwardInputs:
    """Within a completion, kinds of tokens are looked up where another completion's are."""
    assert rows.layout is not None
    return replace(rows, layout=Logical(**vars(rows.layout)))


class Logical(RowLayout):
    def dense_masks(self, mask_function):
        return RowLayout.dense_masks(replace(self, completion_index=self.logical_index), mask_function)


@pytest.mark.parametrize("number", [0, 1])
def test_another_image_of_the_same_size_shows_in_its_completion_alone(
    checkpoint: Path, policy: Policy, number: int
) -> None:
    seeds = [5, 6]
    expected = logprobs(policy, group_with(checkpoint, *seeds))
    seeds[number] = 7
    moved = (logprobs(policy, group_with(checkpoint, *seeds)) - expected).abs().amax(dim=1)
    assert moved[number] >= 0.01 and moved[1 - number] <= 1e-6


def test_wrong_positions_and_kinds_show(checkpoint: Path, policy: Policy) -> None:
    changes: dict[str, Callable[[ForwardInputs], ForwardInputs]] = {
        "qwen2_5_vl": positions_go_on, "gemma3": kinds_at_logical_positions,
    }  # fmt: skip
    group = group_with(checkpoint, 5, 6)
    expected = logprobs(policy, group)
    change = changes[policy.family.model_type]
    with mock.patch.object(policy_module, "shared_inputs", lambda *args: change(shared_inputs(*args))):
        assert (logprobs(policy, group) - expected).abs().max() >= 0.01


def test_an_observation_that_trains_would_show(checkpoint: Path, policy: Policy) -> None:
    """The same tokens as one turn have other tokens in the loss."""
    group = group_with(checkpoint, 5, 5)
    text = make_observation(checkpoint, [], "Look.")
    (observed,) = make_trajectories(group.group.prompt, [[Context((2, text, 4))]]).group.completions
    (path,) = observed.paths
    trained = replace(observed, token_ids=path.token_ids, generator_logprobs=path.token_ids / 1.0, contexts=())
    rows = [
        logprobs(policy, replace(group, group=replace(group.group, completions=[each]))) for each in (observed, trained)
    ]
    assert rows[0].shape == (1, 6) and rows[1].shape == (1, 6 + len(text.token_ids))
    assert (rows[1][:, path.sampled] - rows[0]).abs().max() <= 1e-5
    gradients = [scores(policy, [with_completion(group, each)], shared=True).gradients for each in (observed, trained)]
    assert gradient_error(*gradients) >= 0.01


def test_images_after_the_prompt_are_refused_where_a_model_takes_none(tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("paligemma", tmp_path)
    policy, prompt = make_policy(checkpoint), make_prompt(checkpoint, [noise_image(32, 24, seed=1)])
    seen = Observation("row 3, turn 1", prompt.token_ids, prompt.token_inputs, prompt.mm_inputs, (b"",))
    with pytest.raises(ModelError, match="row 3, turn 1 has images, and paligemma takes them in the prompt alone"):
        logprobs(policy, make_trajectories(prompt, [[Context((1, seen, 1))]]))


def test_placeholders_without_an_image_are_refused(checkpoint: Path, policy: Policy) -> None:
    seen = make_observation(checkpoint, [noise_image(32, 24, seed=1)], "Look.")
    placeholder = policy.transformer.config.image_token_id
    token_ids = torch.cat([seen.token_ids, torch.tensor([placeholder])])
    inputs = {name: torch.cat([ids, ids[-1:]]) for name, ids in seen.token_inputs.items()}
    more = Observation("row 3, turn 1", token_ids, inputs, seen.mm_inputs, seen.images)
    prompt = make_prompt(checkpoint, [], "Which?")
    with pytest.raises(ModelError, match="The tokens of row 3, turn 1 have"):
        logprobs(policy, make_trajectories(prompt, [[Context((1, more, 1))]]))


def test_placeholders_of_an_observation_without_images_are_refused(checkpoint: Path, policy: Policy) -> None:
    policy = make_policy(checkpoint)
    policy.banned_token_ids = policy.family.banned_token_ids(policy.transformer.config)
    seen = Observation("row 3, turn 1", torch.tensor([policy.transformer.config.image_token_id]), {}, {})
    with pytest.raises(ModelError, match="row 3, turn 1 has placeholder tokens, but no images"):
        logprobs(policy, make_trajectories(make_prompt(checkpoint, [], "Which?"), [[Context((1, seen, 1))]]))


def test_images_of_observations_train_a_tower_behind_a_frozen_language_model(checkpoint: Path) -> None:
    policy = make_policy(checkpoint, trainable_modules=["projector"])
    group = group_with(checkpoint, 5, 6).group
    text = make_prompt(checkpoint, [], "Which?")
    assert policy.trains_on(replace(group, prompt=text).rendered)
    assert not policy.trains_on(replace(group, prompt=text, completions=[]).rendered)


@pytest.mark.parametrize("freeze", [True, False])
def test_observations_of_equal_pixels_share_a_run_of_the_tower(checkpoint: Path, freeze: bool) -> None:
    policy = make_policy(checkpoint, freeze_vision_tower=freeze)
    for seeds, patches in (((1, 1), 1), ((2, 2), 2), ((2, 3), 3)):  # the prompt's image is that of seed 1
        group = group_with(checkpoint, *seeds)
        policy.start_step()
        logprobs(policy, group)
        one = num_patches(policy.transformer.config, group.group.prompt)
        assert policy.counters["vision_patches"] == patches * one
        for expected in (stock_scores(policy, [group]), scores(policy, [group], shared=False)):
            assert gradient_error(scores(policy, [group], shared=True).gradients, expected.gradients) <= 1e-5
