"""Files for machines elsewhere: the workflows of a hosted CI, and the Containerfile."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def steps(workflow: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """All steps of a workflow, each with its job."""
    return [(job, step) for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


def commands(workflow: str) -> list[str]:
    """The commands of a workflow, one for each value of its job's matrix."""
    found = []
    for job, step in steps(workflow):
        if "run" in step:
            values = job.get("strategy", {}).get("matrix", {}).get("target", [""])
            found += dict.fromkeys(step["run"].replace("${{ matrix.target }}", value) for value in values)
    return found


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_every_command_is_a_target_of_the_makefile(workflow: str):
    assert {"help", "quickstart", "test", "lock"} <= TARGETS
    for command in commands(workflow):
        assert re.fullmatch(r"make [a-z-]+", command), command
        assert command.removeprefix("make ") in TARGETS, command


def test_the_ci_runs_the_commands_of_ci_run():
    script = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert script == ["make check", "make check-lock", "make test", "make test-ci", "make dist"]
    assert sorted(commands("ci")) == sorted(script)
    assert commands("nightly") == ["make test-all", "make fuzz", "make chaos"]


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_jobs_end_in_time_and_use_actions_of_one_version(workflow: str):
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    for job, step in steps(workflow):
        assert set(job) <= {"runs-on", "timeout-minutes", "strategy", "steps"} and job["timeout-minutes"] > 0
        assert "run" in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


def test_the_tests_run_on_every_python_of_the_package():
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert matrix == classifiers == ["3.11", "3.12", "3.13"]


def test_the_container_has_its_paths_below_opt():
    text = CONTAINERFILE.replace("\\\n", " ")
    places = re.findall(r"^(?:WORKDIR|COPY \.) (\S+)", text, re.MULTILINE) + re.findall(r"\bHOME=(\S+)", text)
    assert places == ["/opt/rl-vlm", "/opt/rl-vlm", "/opt/home"]
    (target,) = re.findall(r"^RUN make (\S+)$", text, re.MULTILINE)
    assert f"INSTALLED := {target}\n" in MAKEFILE


def test_it_is_said_that_the_container_was_never_built():
    """Once someone has built it, both places say so, and this test with them."""
    assert "This file has never been built" in CONTAINERFILE
    assert "`Containerfile` has never been built" in (ROOT / "docs" / "install.md").read_text()
