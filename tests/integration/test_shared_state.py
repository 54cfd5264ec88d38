"""Layers with a state: wrong states are noticed. test_families.py has the comparison with dense rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from sys import modules
from typing import Any

import pytest
import torch

from rl_vlm.errors import ModelError
from rl_vlm.model import shared_state
from rl_vlm.model.loading import why_not_shared
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.model.shared_state import CONVOLUTION, DELTA_RULE, SharedRow, delta_rule_of_row, routed
from rl_vlm.types import Forward
from tests.helpers.builders import make_policy, whole
from tests.helpers.family_parity import case_groups
from tests.helpers.tiers import families_in_tiers
from tests.tiny.build import TINY_FAMILIES
from tests.tiny.hybrid import HYBRID

Change = Callable[[Policy, pytest.MonkeyPatch], None]


def functions_of(policy: Policy) -> Any:
    """The module of transformers whose functions are replaced."""
    return modules[type(policy.transformer.get_decoder()).__module__]


def change_layout(policy: Policy, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    policy.transformer.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: (args, change(kwargs)), with_kwargs=True
    )


def crosses_completions(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone knows the layout, so states go on along the row."""
    change_layout(policy, lambda kwargs: {name: value for name, value in kwargs.items() if name != "seq_idx"})


def of_another_prompt(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(kwargs: dict[str, Any]) -> dict[str, Any]:
        layout = kwargs["seq_idx"].layout
        others = replace(layout, owner_N=(layout.owner_N + 1) % len(layout.prefix_index))
        return kwargs | {"seq_idx": SharedRow(others)}

    change_layout(policy, change)


def last_inputs_are_not_passed(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    last_inputs = shared_state.last_inputs

    def forgotten(layout: RowLayout, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        places, are_inputs = last_inputs(layout, number)
        return places, torch.zeros_like(are_inputs)

    monkeypatch.setattr(shared_state, "last_inputs", forgotten)


def state_is_not_passed(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = functions_of(policy)
    stock = getattr(module, DELTA_RULE).__wrapped__

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs | {"initial_state": None})

    monkeypatch.setattr(module, DELTA_RULE, routed(forgetful, delta_rule_of_row))


WRONG_STATES = [crosses_completions, of_another_prompt, last_inputs_are_not_passed, state_is_not_passed]

OF_DELTA_RULE = [of_another_prompt, state_is_not_passed]


@pytest.fixture(scope="module", params=families_in_tiers(HYBRID))
def family(request: pytest.FixtureRequest) -> str:
    if request.param not in TINY_FAMILIES:
        pytest.skip("needs a later transformers")
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("change", WRONG_STATES)
def test_a_wrong_state_would_show(
    family: str, checkpoint: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(checkpoint)
    if change in OF_DELTA_RULE and not hasattr(functions_of(policy), DELTA_RULE):
        pytest.skip("its state is the last inputs, and these prompts end with the same words")
    batch = whole(case_groups(checkpoint, "several prompts"), shared=True)
    expected = policy(Forward(batch)).logprobs_NT
    change(policy, monkeypatch)
    assert (policy(Forward(batch)).logprobs_NT - expected).abs().max() >= 0.01


def test_a_layer_that_calls_other_functions_is_not_shared(
    family: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(checkpoint)
    assert why_not_shared(policy.transformer) is None
    monkeypatch.delattr(functions_of(policy), CONVOLUTION)
    assert "computes layers with a state in a new way" in str(why_not_shared(policy.transformer))


def test_a_layer_that_does_not_pass_the_row_on_is_an_error(
    family: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = make_policy(checkpoint), whole(case_groups(checkpoint, "several prompts"), shared=True)
    function = getattr(functions_of(policy), CONVOLUTION)

    def without_row(*args: Any, seq_idx: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr(functions_of(policy), CONVOLUTION, without_row)
    with pytest.raises(ModelError, match=r"calls knew the shared row\. Set memory\.prefix_sharing: dense"):
        policy(Forward(batch))
