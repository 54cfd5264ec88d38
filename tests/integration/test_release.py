"""A release: a source distribution, the wheel that it builds, and a run of it in a clean environment."""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rl_vlm", "rewards", "launch")
BESIDE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
WRITTEN = {"PKG-INFO", "setup.cfg"}
"""Files that setuptools writes."""
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@dataclass(frozen=True)
class Release:
    """Both files of a release, with a wheel that is built from the checkout."""

    sdist: Path
    wheel: Path
    of_checkout: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Build offline with the build backend itself, from a copy of the files that git has."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend, setuptools >= 77, is not installed")
    folder = tmp_path_factory.mktemp("release")
    copy_checkout(folder / "checkout")
    sdist = build("sdist", folder / "checkout", folder)
    of_checkout = build("wheel", folder / "checkout", folder / "of_checkout")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return Release(sdist, build("wheel", folder / "unpacked" / f"rl_vlm-{VERSION}", folder), of_checkout)


def copy_checkout(folder: Path) -> None:
    """Copy the files that git has or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a wheel or an sdist, and return its path."""
    into.mkdir(exist_ok=True)
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(into)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


def wheel_files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sdist_files(path: Path) -> set[str]:
    """The names of an sdist's files, without the folder that holds all of them and what setuptools writes."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {name for name in names - WRITTEN if ".egg-info/" not in name}


def test_the_files_are_named_by_the_version(release: Release):
    assert (release.sdist.name, release.wheel.name) == ("rl_vlm-0.1.0.tar.gz", "rl_vlm-0.1.0-py3-none-any.whl")


def test_the_source_distribution_builds_the_wheel_of_the_checkout(release: Release):
    assert wheel_files(release.wheel) == wheel_files(release.of_checkout)
    assert len(wheel_files(release.wheel)) > 250


def test_the_source_distribution_holds_what_a_build_needs_and_no_tests(release: Release):
    packed = {name for name in wheel_files(release.wheel) if ".dist-info/" not in name}
    assert sdist_files(release.sdist) == packed | {name for name in BESIDE if (ROOT / name).is_file()}
    assert release.sdist.stat().st_size < 2_000_000


def test_the_metadata_is_complete(release: Release):
    text = next(text for name, text in wheel_files(release.wheel).items() if name.endswith("/METADATA")).decode()
    found: email.message.Message = email.parser.Parser().parsestr(text)
    assert [found[name] for name in ("Name", "Version", "License-Expression", "Requires-Python")] == [
        "rl-vlm", "0.1.0", "Apache-2.0", ">=3.11"
    ]  # fmt: skip
    assert found["Summary"] == "GRPO post-training for vision-language models"
    assert "GRPO" in found["Keywords"].split(",")
    classifiers = found.get_all("Classifier", [])
    assert [name for name in classifiers if name.startswith("Programming Language :: Python :: 3.")] == [
        f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)
    ]
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert not [name for name in classifiers if name.startswith("License ::")]  # the expression says it
    assert not [name for name in found if name in ("Home-page", "Project-URL", "Download-URL")]  # there is no address
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


@pytest.fixture(scope="module")
def clean(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `bin` of a new environment with the wheel. Its other packages are those of the tests' environment."""
    environment = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*command, str(release.wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = environment.glob("lib/python*/site-packages")
    # Files *.pth of a folder that a .pth file names are not read. So an editable rl-vlm in it is not found.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def run(clean: Path, folder: Path, *command: str) -> str:
    """Run a program of the clean environment in a folder, and return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {"OMP_NUM_THREADS": "1", "PATH": f"{clean}:{os.environ['PATH']}"}
    done = subprocess.run(
        [clean / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_wheel_runs_a_new_project(clean: Path, tmp_path: Path):
    """Train and export without the checkout."""
    program = "import rl_vlm, rewards, launch; print(rl_vlm.__file__, rewards.__file__, launch.__file__)"
    site = next(clean.parent.glob("lib/python*/site-packages"))
    assert run(clean, tmp_path, "python", "-c", program).split() == [f"{site}/{name}/__init__.py" for name in PACKAGES]

    run(clean, tmp_path, "rl-vlm", "new", "mine")
    project = tmp_path / "mine"
    short = ("max_steps=2", "eval_steps=0", "disable_tqdm=true")
    assert "2 optimizer steps took" in run(clean, project, "rl-vlm", "train", "run.yaml", *short)
    summary = json.loads((project / "runs/first/summary.json").read_text())
    assert summary["optimizer_steps"] == 2 and (project / "runs/first/report.html").is_file()
    run(clean, project, "rl-vlm", "export", "runs/first", "--to", "model")
    assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in (project / "model").iterdir()}
