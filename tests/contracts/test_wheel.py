"""What an installed copy holds."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built offline by the build backend itself, from a copy, so that the checkout stays as it is."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend, setuptools >= 77, is not installed")
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    program = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True)
    return zipfile.ZipFile(next(source.glob("*.whl")))


def test_the_wheel_holds_every_module_and_the_launch_files(wheel: zipfile.ZipFile):
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    data = [*(ROOT / "launch").rglob("*.yaml")]
    data += [path for ending in ("json", "jinja", "css", "js") for path in (ROOT / "rl_vlm").rglob(f"*.{ending}")]
    expected = {str(path.relative_to(ROOT)) for path in [*modules, *data]}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.ci
def test_an_installed_copy_writes_a_project_that_is_ready_to_run(wheel: zipfile.ZipFile, tmp_path: Path):
    """Without the checkout: nothing of tests/, examples/ or configs/ is there."""
    wheel.extractall(tmp_path / "site")
    program = "import launch.cli, sys; print(launch.cli.__file__, flush=True); sys.exit(launch.cli.main(sys.argv[1:]))"
    for folder, words in ((tmp_path, ["new", "mine"]), (tmp_path / "mine", ["train", "run.yaml", "--dry-run"])):
        command, environment = (
            [sys.executable, "-c", program, *words],
            os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        )
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.splitlines()[0] == str(tmp_path / "site/launch/cli.py")
    assert "# Checked: model: the function model.py:starting_model loads." in result.stdout


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile):
    def read(ending: str) -> str:
        return wheel.read(next(name for name in wheel.namelist() if name.endswith(ending))).decode()

    assert "rl-vlm = launch.cli:command" in read(".dist-info/entry_points.txt")
    assert "Apache License" in read(".dist-info/licenses/LICENSE")
    assert "License-Expression: Apache-2.0" in read(".dist-info/METADATA")
