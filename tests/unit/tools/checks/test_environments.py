"""What the doctor and a dry run say about tools and environments."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.dry_run import dry_run
from rl_vlm.config.schema import RunConfig
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.table import examine
from tests.helpers import tiny_run
from tests.tiny.build import build_tiny

GAME, DICE, BROKEN, CANVAS, SILENT = (f"{__name__}:{name}" for name in ("Game", "Dice", "Broken", "Canvas", "Silent"))
NOT_HINTED, CROP, FIRST = f"{__name__}:NotHinted", f"{__name__}:crop", f"{__name__}:first"
ROWS = f"{__name__}:rows"


def rows() -> list[dict[str, Any]]:
    """Rows of two environments, of which the first row uses `game`."""
    return [row | {"environment": "game" if i else "dice"} for i, row in enumerate(tiny_run.rows())]


def crop(x: int) -> str:
    """Crop the image.

    Args:
        x: Left edge.
    """
    return str(x)


def first(completions: list[Any]) -> list[float]:
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


class Game:
    """The content follows from the seed."""

    closed = 0

    def reset(self, seed: int, solution: str, model_image_sizes: Any, **columns: Any) -> str:
        assert len(model_image_sizes) == len(columns["images"]) == 1, model_image_sizes
        return f" Game {seed}, {solution}."

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The guess.
        """
        return "no"

    def get_reward(self) -> float:
        return 0.5

    def close(self) -> None:
        Game.closed += 1


class Dice(Game):
    """The content does not follow from the seed."""

    rolled = itertools.count()

    def reset(self, **columns: Any) -> str:
        return f" Dice {next(self.rolled)}."


class Canvas(Game):
    """Draws into one array again and again."""

    canvas = np.zeros((8, 8, 3), dtype=np.uint8)

    def reset(self, **columns: Any) -> list[dict[str, Any]]:
        self.canvas += 50
        return [{"type": "image", "image": self.canvas}]


class Silent(Game):
    """Starts with content only the first time."""

    def reset(self, **columns: Any) -> str | None:
        self.starts = getattr(self, "starts", 0) + 1
        return " Hello." if self.starts == 1 else None


class Broken(Game):
    def reset(self, **columns: Any) -> str:
        raise OSError("no such port")


class NotHinted:
    def reset(self, **columns: Any) -> None: ...

    def guess(self, number):  # pyright: ignore
        return 1

    def get_reward(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def config_of(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    return tiny_run.make_config(checkpoint, output_dir, **settings)


def problems(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in diagnosis.findings]


def test_a_dry_run_names_all_problems_at_once(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"tools": ["none.py:f", CROP], "environment": {"a": NOT_HINTED, "b": f"{__name__}:nothing", "c": GAME}}
    (error,) = dry_run(config_of(checkpoint, tmp_path / "run", **settings), "train")[1]
    for part in ("rollout.tools: none.py:f: there is no file", "NotHinted: ", "has no function 'nothing'"):
        assert part in error


def test_a_dry_run_names_tools_and_functions_that_read_the_first_turn(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"tools": [CROP], "environment": GAME, "reward_funcs": [FIRST]}
    text, errors = dry_run(config_of(checkpoint, tmp_path / "run", **settings), "train")
    assert errors == []
    assert "tools crop, Game.guess" in text
    assert "# Not checked: how the chat template writes tools and observations; `rl-vlm doctor` tries it.\n" in text
    assert f"reward function {FIRST} reads `completion[0]`, the first turn" in text
    without = dry_run(config_of(checkpoint, tmp_path / "run", reward_funcs=[FIRST]), "train")[0]
    assert not any(part in without for part in ("completion[0]", "tools crop", "chat template writes"))


def test_a_dry_run_needs_the_column_of_several_environments(checkpoint: Path, tmp_path: Path) -> None:
    several = {"environment": {"game": GAME, "shop": DICE}}
    (error,) = dry_run(config_of(checkpoint, tmp_path / "run", **several), "train")[1]
    assert "the data has no column `environment`" in error
    (error,) = dry_run(config_of(checkpoint, tmp_path / "run", dataset_name=ROWS, **several), "train")[1]
    assert "row 0: column `environment` is 'dice', which rollout.environment does not name" in error


def list_rows(**_: Any) -> list[dict[str, Any]]:
    return [row | {"environment": ["game"]} for row in tiny_run.rows()]


def test_a_dry_run_names_a_row_whose_environment_is_no_text(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"environment": {"game": GAME}, "dataset_name": f"{__name__}:list_rows"}
    (error,) = dry_run(config_of(checkpoint, tmp_path / "run", **settings), "train")[1]
    assert "row 0: column `environment` is ['game'], which rollout.environment does not name; it names game" in error


def test_a_dry_run_checks_rows_although_two_rewards_share_a_name(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"environment": {"game": GAME}, "reward_funcs": [{"function": "exact_match", "name": "Game"}]}
    names, column = dry_run(config_of(checkpoint, tmp_path / "run", **settings), "train")[1]
    assert names.startswith("2 rewards are called 'Game'")
    assert "the data has no column `environment`" in column


def looks(completions: list[Any], environments: list[Any]) -> list[float]:
    return [0.0 for _ in environments]


STEP = {"prompts_per_step": 2, "num_generations": 4}
HELD_OUT = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "eval_steps": 1, "eval_temperature": 1.0}
CHUNKS = HELD_OUT | {"max_num_seqs": 30, "num_generations_eval": 8}


@pytest.mark.parametrize(
    ("kind", "settings", "most", "needed"),
    [
        ("train", STEP | {"max_resampling_rounds": 1}, 15, 16),
        ("train", STEP | {"steps_per_generation": 2}, 15, 16),
        ("train", STEP | {"steps_per_generation": 2}, 16, None),
        ("train", CHUNKS, 23, 24),
        ("eval", CHUNKS, 23, 24),
        ("eval", CHUNKS, None, None),
    ],
)
def test_a_dry_run_counts_environments_that_rewards_keep(
    kind: Any, settings: Any, most: int | None, needed: int | None, checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"environment": GAME, "max_environments": most, "reward_funcs": [f"{__name__}:looks"]} | settings
    errors = dry_run(config_of(checkpoint, tmp_path / "run", **settings), kind)[1]
    assert len(errors) == (needed is not None)
    for error in errors:
        assert error.startswith(f"rollout.max_environments {most} is too small: a reward function names `environments`")
        assert error.endswith(f"set it to {needed}, or leave it out")
    settings |= {"reward_funcs": ["exact_match"]}
    assert dry_run(config_of(checkpoint, tmp_path / "run", **settings), kind)[1] == []


@pytest.mark.parametrize(
    ("rewards", "environment", "expected"),
    [
        ([], GAME, []),
        ([{"function": "exact_match", "weight": 0.0}], GAME, []),
        (
            [],
            f"{__name__}:Quiet",
            ["no reward has a weight"],
        ),
        ([{"function": "exact_match", "name": "Game"}], GAME, ["2 rewards are called 'Game'"]),
    ],
)
def test_rewards_of_environments(rewards: list, environment: str, expected: list, checkpoint: Path, tmp_path: Path):
    config = config_of(checkpoint, tmp_path / "run", reward_funcs=rewards, environment=environment)
    errors = dry_run(config, "train")[1]
    assert len(errors) == len(expected)
    assert all(error.startswith(start) for error, start in zip(errors, expected, strict=True))


class Quiet:
    def reset(self, **columns: Any) -> None: ...

    def look(self) -> str:
        """Look around."""
        return "dark"


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        (GAME, None),
        (f"{__name__}:Quiet", None),
        (DICE, ("warning", "unlike starts")),
        (CANVAS, ("warning", "unlike starts")),
        (SILENT, ("warning", "unlike starts")),
        (BROKEN, ("error", "environment that fails")),
    ],
)
@pytest.mark.ci
def test_each_environment_is_reset_twice(environment: str, kind: Any, checkpoint: Path, tmp_path: Path) -> None:
    closed = Game.closed
    diagnosis = examine(config_of(checkpoint, tmp_path / "run", environment=environment), with_model=False)
    name = environment.rpartition(":")[2]
    assert problems(diagnosis) == ([] if kind is None else [kind])
    place = f"reset of {name} on {tiny_run.ROWS}, row 0"
    assert [finding.what.startswith(place) for finding in diagnosis.findings] == [True] * len(diagnosis.findings)
    if environment == BROKEN:
        assert "no such port" in diagnosis.findings[0].what
    else:
        assert f"two times {place}" in diagnosis.checked
    assert any("observations" in line or "tools" in line for line in diagnosis.checked)
    assert Game.closed == closed + (name != "Quiet")


def test_an_environment_is_reset_on_a_row_that_uses_it(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"dataset_name": ROWS, "environment": {"game": GAME, "dice": DICE, "shop": BROKEN}}
    diagnosis = examine(config_of(checkpoint, tmp_path / "run", **settings), with_model=False)
    assert [finding.what.split(":")[0] for finding in diagnosis.findings] == [f"reset of Dice on {__name__}"]
    assert any(line.startswith("two times reset of Game") and line.endswith("row 1") for line in diagnosis.checked)
    assert "environment Broken: no training row uses it" in diagnosis.not_checked


def test_an_environment_that_hangs_is_a_finding(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(checkpoint, tmp_path / "run", environment=f"{__name__}:Slow", tool_timeout=0.2)
    (finding,) = examine(config, with_model=False).findings
    assert (finding.kind, "no answer within 0.2 seconds" in finding.what) == ("environment that fails", True)


class Slow(Game):
    def reset(self, **columns: Any) -> None:
        import time

        time.sleep(3)
