import pytest

from rl_vlm.config.changes import (
    OF_ONE_START,
    OF_WINDOWS,
    UNCHANGEABLE,
    changed_settings,
    changed_sources,
    flat_settings,
    function_sources,
    refused_changes,
)
from rl_vlm.config.schema import SETTINGS, RunConfig


def config(**sections):
    return RunConfig.model_validate({"model": {"model_name_or_path": "m"}, **sections})


def test_settings_are_flat_and_plain():
    flat = flat_settings(config(rewards={"reward_funcs": ["a", {"function": "b", "weight": 2}]}))
    assert flat.keys() == SETTINGS.keys()
    assert flat["train.seed"] == 42 and flat["rewards.reward_funcs"][1]["weight"] == 2.0


def test_every_named_setting_exists():
    named = [name for names in (*UNCHANGEABLE.values(), OF_WINDOWS, OF_ONE_START) for name in names]
    assert set(named) <= SETTINGS.keys() and len(named) == len(set(named))


def test_changes_are_named_with_both_values():
    saved = flat_settings(config(train={"learning_rate": 1e-6}))
    del saved["train.adam_beta1"]  # of a version that did not have it
    later = config(train={"learning_rate": 2e-6, "adam_beta1": 0.5, "resume_from_checkpoint": "auto"})
    assert changed_settings(saved, later) == {"train.learning_rate": "1e-06 -> 2e-06"}


def test_a_changed_source_is_a_change(tmp_path):
    path = tmp_path / "my.py"
    path.write_text("def loss(ratio, inputs, algorithm):\n    return ratio, {}\n")
    own = config(algorithm={"loss_type": f"{path}:loss"})
    saved = function_sources(own)
    assert saved.keys() == {"algorithm.loss_type"} and changed_sources(saved, own) == {}
    assert function_sources(config()) == {} and changed_sources(saved, config()) == {}
    assert changed_sources({}, own) == {}  # of a version that recorded none
    path.write_text("def loss(ratio, inputs, algorithm):\n    return 2 * ratio, {}\n")
    (change,) = changed_sources(saved, own).values()
    old, new = saved["algorithm.loss_type"], function_sources(own)["algorithm.loss_type"]
    assert change == f"'{path}:loss' with the source {old} -> the source {new}" and old != new


@pytest.mark.parametrize(
    ("within_window", "keeps_best", "refused"),
    [
        (False, False, ["train.seed"]),
        (True, False, ["train.seed", "algorithm.beta"]),
        (False, True, ["train.seed", "data.eval_dataset_name"]),
    ],
)
def test_changes_that_cannot_be_applied(within_window, keeps_best, refused):
    names = ("train.seed", "algorithm.beta", "train.learning_rate", "data.eval_dataset_name")
    lines = refused_changes(dict.fromkeys(names, "1 -> 2"), within_window, keeps_best)
    assert [line.split("`")[1] for line in lines] == refused
    assert lines[0] == "`train.seed` 1 -> 2: rows are drawn in an order that follows from it"
