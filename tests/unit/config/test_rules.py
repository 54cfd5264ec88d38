"""How rules about settings are checked."""

from typing import Any

import pytest
from pydantic import ValidationError

from rl_vlm.config.rules import Rule, broken, unread
from rl_vlm.config.schema import RunConfig


def messages(*rules: Rule, **sections: Any) -> list[str]:
    run = RunConfig.model_validate({"model": {"model_name_or_path": "tiny"}, **sections})
    return list(broken(run, rules))


def test_settings_at_their_defaults_break_no_rule():
    rule = Rule("num_generations top_k", lambda run: True, "{names} with {rollout.top_k}")
    assert messages(rule) == messages(rule, rollout={"top_k": 0, "num_generations": 8}) == []
    assert messages(rule, rollout={"top_k": 3}) == ["`top_k` with 3"]
    assert messages(rule, rollout={"top_k": 3, "num_generations": 4}) == ["`num_generations`, `top_k` with 3"]


def test_a_rule_that_names_no_setting_is_about_missing_ones():
    assert messages(Rule("", lambda run: run.data.dataset_name is None, "no data")) == ["no data"]
    assert messages(Rule("", lambda run: run.data.dataset_name is not None, "data")) == []


def test_each_list_of_values_makes_a_message():
    rule = Rule("seed", lambda run: [{"half": run.train.seed / 2}, {"half": "{x}"}], "half of {train.seed} is {half:}")
    assert messages(rule, train={"seed": 6}) == ["half of 6 is 3.0", "half of 6 is {x}"]
    assert messages(Rule("seed", lambda run: [], "never"), train={"seed": 6}) == []


def test_the_message_about_settings_without_effect_agrees_with_their_number():
    rule = unread("seed max_steps", lambda run: run.train.seed > 5, "above 5", "lower `seed`")
    assert messages(rule, train={"seed": 6}) == ["`seed` has no effect above 5; leave it out, or lower `seed`"]
    assert messages(rule, train={"seed": 6, "max_steps": 1}) == [
        "`seed`, `max_steps` have no effect above 5; leave them out, or lower `seed`"
    ]
    assert messages(rule, train={"seed": 4}) == []


def test_a_correction_of_samples_from_the_current_weights_is_refused():
    corrected = {"algorithm": {"vllm_importance_sampling_clip_max": 2.0}}
    message = "`vllm_importance_sampling_clip_max`: no effect on `engine` hf without `max_rollout_tokens`, .*; leave"
    with pytest.raises(ValidationError, match=message):
        messages(**corrected)
    assert messages(**corrected, rollout={"max_rollout_tokens": 100}) == []
