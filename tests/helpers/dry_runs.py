"""What `rl-vlm train CONFIG --dry-run` prints for every file in `configs/`, as kept in `tests/data/dry_runs/`.

`python -m tests.helpers.dry_runs` writes the kept files again.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from PIL import Image

from launch.dry_run import dry_run as checked_run
from rl_vlm.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
TINY = {"blinks", "digits", "digits_lora", "grid_game", "grounding", "intervals", "look_closer", "motion", "order"}
"""Configs of models and data that a run makes itself, on a CPU."""
KEPT = ROOT / "tests/data/dry_runs"

OPTIONAL_PACKAGES = ("bitsandbytes", "vllm")
"""Packages that a dry run looks for. Whether this machine has them is not to change what is kept."""
IMAGE = "train2014/COCO_train2014_000000000001.jpg"
GROUNDING_ROWS = [
    {
        "id": number,
        "image": IMAGE,
        "conversations": [
            {"from": "human", "value": f"<image>Please provide the bounding box of this object: cup {number}."},
            {"from": "gpt", "value": [10.5, 20.0, 110.0, 220.5]},
        ],
    }
    for number in range(16)
]
"""Rows as VLM-R1's annotation files have them."""


def opening_comment(path: Path) -> str:
    """Return the comment lines that a config begins with."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def num_processes(path: Path) -> int:
    """Return the number of processes that a config's own command starts."""
    named = re.search(r"--num_processes (\d+)", opening_comment(path))
    return int(named[1]) if named else 1


def dry_run(path: Path) -> str:
    """Return the text of a dry run and its problems, in an empty folder with stand-ins for the user's own files."""
    with working_folder(), started_with(num_processes(path)):
        text, problems = checked_run(load_config(path), "train")
    return text + "".join(f"# Problem: {problem}\n" for problem in problems)


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """Work in a new folder with `examples/` and rows for grounding, without a cache of the hub."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("examples").symlink_to(ROOT / "examples")
        image = Path("data/coco", IMAGE)
        image.parent.mkdir(parents=True)
        Image.new("RGB", (640, 480)).save(image)
        Path("data/refcoco").mkdir()
        for name in ("train", "held_out"):
            Path(f"data/refcoco/{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in GROUNDING_ROWS))
        with patch("huggingface_hub.constants.HF_HUB_CACHE", folder):
            yield


@contextlib.contextmanager
def started_with(processes: int) -> Iterator[None]:
    """Act as one of this many processes on a machine with all optional packages."""
    installed = {name: ModuleType(name) for name in OPTIONAL_PACKAGES}
    for name, module in installed.items():
        module.__spec__ = ModuleSpec(name, None)
    before = {name: sys.modules.get(name) for name in installed}
    sys.modules.update(installed)  # `patch.dict` would also drop the modules that a dry run imports
    try:
        with patch.dict(os.environ, WORLD_SIZE=str(processes)):
            yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def kept_file(path: Path) -> Path:
    """Return the file that keeps the dry run of a config."""
    return KEPT / f"{path.stem}.txt"


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for config in CONFIGS:
        kept_file(config).write_text(dry_run(config))
