"""Settings of other systems: their rows, and the page that describes them."""

import re
from pathlib import Path

import pytest

from rl_vlm.config.elsewhere import LEFT_OUT, ROWS, SKYRL, instead_of, row_of
from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import SECTIONS
from rl_vlm.config.trl_fields import translate
from rl_vlm.config.trl_refused import CHANGE_NO_RESULT, NOT_HERE

PAGE = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()
SECTIONS_OF_PAGE = {"VLM-R1": ["VLM-R1"], "EasyR1 and verl": ["EasyR1", "verl"], "ms-swift": ["ms-swift"]}
NO_SETTINGS = {"name", "reward_model.ground_truth"}
"""Parts of the left column that are no keys: a part of a key, a column. Variables are in capitals."""


def is_known(name: str, system: str) -> bool:
    """Whether a setting, or the settings below it, have a row."""
    if row_of(name, ROWS[system]) or row_of(f"{name}.any", ROWS[system]) or name in FULL_NAMES:
        return True
    try:
        return translate(name, "x", {name: "x"}) is not None
    except ValueError:
        return True


def cells(heading: str) -> list[tuple[str, str]]:
    """Both columns of a section's tables, without the head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    return [(row[0], row[1]) for row in rows]


@pytest.mark.parametrize("heading", SECTIONS_OF_PAGE)
def test_the_page_names_settings_that_have_a_row(heading: str):
    left = [re.split(r"[: ]", name)[0] for theirs, _ in cells(heading) for name in re.findall(r"`([^`]+)`", theirs)]
    names = [name for name in left if name not in NO_SETTINGS and not name.isupper()]
    assert len(names) >= 8
    systems = SECTIONS_OF_PAGE[heading]
    assert [name for name in names if not any(is_known(name, system) for system in systems)] == []


@pytest.mark.parametrize("heading", SECTIONS_OF_PAGE)
def test_the_page_names_settings_of_this_project(heading: str):
    names = [name for _, ours in cells(heading) for name in re.findall(r"`(\w+\.)?(\w+)(?:: [^`]*)?`", ours)]
    settings = [(section[:-1], leaf) for section, leaf in names if section[:-1] in SECTIONS]
    assert [leaf for section, leaf in settings if FULL_NAMES.get(leaf) != f"{section}.{leaf}"] == []


def test_advice_and_conversions_name_settings_that_exist():
    rows = [row for table in (SKYRL, *ROWS.values()) for row in table.values()]
    named = [name for row in rows for name in re.findall(r"`(\w+\.\w+)[:`]", row.advice)]
    ours = [name for name in named if name.partition(".")[0] in SECTIONS]
    assert len(ours) > 100
    assert [name for name in ours if name not in FULL_NAMES.values()] == []


def test_defaults_have_rows():
    for system, defaults in LEFT_OUT.items():
        assert [name for name in defaults if not is_known(name, system)] == []


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("worker.rollout.n", "write `rollout.num_generations`"),
        ("critic.optim.lr", "leave it out: GRPO has no critic"),
        ("worker.ref.fsdp.enable_full_shard", "leave it out: the reference model is sharded as the policy is"),
        ("algorithm.kl_coef", "write `algorithm.beta`"),
        ("algorithm.gigpo.step_advantage_w", "write `algorithm.turn_weight`"),
        ("gamma", "write `algorithm.turn_discount`, with `algorithm.turn_advantages`"),
        ("env.max_steps", "write `rollout.max_turns`"),
        ("generator.max_turns", "write `rollout.max_turns`"),
        ("env_class", "write `rollout.environment: skyrl:ID`, with `rollout.environment_protocol: steps`"),
        ("environment.skyrl_gym.text2sql.db_path", "write `rollout.environment_kwargs`"),
        (
            "gym_env",
            "write `rollout.environment`, with `rollout.environment_protocol: steps`; arguments are "
            "`rollout.environment_kwargs`",
        ),
        ("no_such_setting", None),
    ],
)
def test_the_longest_end_of_a_key_decides(key: str, advice: str | None):
    assert instead_of(key) == advice


def test_reasons_that_change_no_result_are_reasons():
    assert [reason for reason in CHANGE_NO_RESULT if reason not in NOT_HERE] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"multi_turn.enable": True, "multi_turn.max_assistant_turns": 5}, {"max_turns": 5}),
        ({"multi_turn.enable": True, "multi_turn.max_assistant_turns": None}, {}),
        ({"multi_turn.enable": False, "multi_turn.max_assistant_turns": 5}, {}),
    ],
)
def test_turns_of_verl_count_with_tools(given: dict, expected: dict):
    given = {f"actor_rollout_ref.rollout.{name}": value for name, value in given.items()}
    key = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
    row = row_of(key, ROWS["verl"])
    assert row is not None and row.converts is not None
    assert row.converts(given[key], given) == expected


@pytest.mark.parametrize("key", ["multi_turn_scheduler", "actor_rollout_ref.rollout.multi_turn.tool_config_path"])
def test_tools_of_others_are_named(key: str):
    assert str(instead_of(key)).startswith("write `rollout.tools`, ")
