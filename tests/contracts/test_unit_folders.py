"""Unit tests are in the folders of the product, under the names of its modules."""

from pathlib import Path

from tests.helpers.pages import ROOT

OWN_ROOTS = ("benchmarks", "examples", "launch", "rewards")
"""Folders of the product outside of `rl_vlm/`."""
TOPICS = {
    "config/test_ready_files.py": "the files of `configs/`",
    "data/test_mixture.py": "several sources as one: samples, draws, checks and fingerprints",
    "data/video/test_bad_rows.py": "the check of all data, with many bad videos",
    "data/video/test_decoding_cost.py": "processor time and memory of seeking",
    "data/video/test_rows.py": "modules of `data/`, with videos in the rows",
    "distributed/test_shares.py": "memory per rank, which several modules keep low",
    "reward/test_environments.py": "rewards of environments, from the suite to the table",
    "reward/test_systems.py": "functions of other systems, from loading to scores",
    "rewards/test_tables.py": "the tables of docs/built_in_rewards.md",
    "rollout/environments/test_lost_servers.py": "trajectories on servers of `rollout/vllm/`",
    "rollout/environments/test_worked_trajectory.py": "the trajectory of docs/environments.md",
    "tools/checks/test_doctor.py": "small checks of several modules, and their report",
    "tools/checks/test_public_rewards.py": "the doctor and the reward check on functions of other systems",
}
"""Unit tests that are named by a topic, because they test several modules or a page."""


def named_otherwise(root: Path) -> list[str]:
    """Return unit tests without a folder of the product, or with a name that is not its module's or the folder's.

    The name of a test may go on after the module's, as in `test_collector_ahead.py`.
    """
    found = []
    for path in (root / "tests/unit").rglob("test_*.py"):
        test = path.relative_to(root / "tests/unit")
        folder = (root if test.parts[0] in OWN_ROOTS else root / "rl_vlm") / test.parent
        names = [folder.name, *(module.stem for module in folder.glob("*.py"))] if folder.is_dir() else []
        if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
            found.append(str(test))
    return sorted(found)


def test_what_is_named_otherwise(tmp_path: Path):
    for name in ("rl_vlm/data/video/read.py", "rl_vlm/stages.py", "launch/cli.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    right = ["test_stages.py", "data/video/test_read.py", "data/video/test_read_twice.py", "data/test_data.py"]
    wrong = ["data/test_reader.py", "data/video/test_reader.py", "launch/test_stages.py", "video/test_read.py"]
    for name in [*right, "launch/test_cli.py", *wrong]:
        (tmp_path / "tests/unit" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests/unit" / name).touch()
    assert named_otherwise(tmp_path) == wrong


def test_unit_tests_have_the_folders_and_names_of_modules_or_a_topic():
    assert named_otherwise(ROOT) == sorted(TOPICS)
