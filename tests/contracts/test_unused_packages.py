"""A run imports no package that it does not use, such as DeepSpeed, which prints lines and takes seconds."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_run import build_checkpoint

ROOT = Path(__file__).parents[2]

NOT_USED = ("bitsandbytes", "datasets", "deepspeed", "matplotlib", "trl", "vllm", "wandb")
"""Packages of settings that the run below does not have. Matplotlib draws reward.png after the last step."""

PROGRAM = """
import json, sys
from pathlib import Path

from rl_vlm.run.instrument import Instrument
from rl_vlm.run.run import train
from rl_vlm.tools.instruments import INSTRUMENTS
from tests.helpers.tiny_run import make_config

class Watch(Instrument):
    found = []

    def after_step(self, is_last):
        self.found.append(sorted(name for name in sys.argv[3:] if name in sys.modules))

train(make_config(sys.argv[1], Path(sys.argv[2]), max_steps=2), [*INSTRUMENTS, lambda observed: Watch()])
print(json.dumps([Watch.found, "matplotlib" in sys.modules]))
"""


@pytest.mark.ci
def test_a_run_imports_no_package_that_it_does_not_use(tmp_path: Path):
    checkpoint = build_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path / "run"), *NOT_USED]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found, draws = json.loads(result.stdout)
    assert found == [[], []]
    assert draws
    assert "Setting accelerator" not in result.stdout + result.stderr


def test_no_file_of_the_package_imports_scikit_learn():
    """Transformers imports it where it is installed, so `sys.modules` would not tell."""
    files = [path for package in ("rl_vlm", "rewards", "launch") for path in (ROOT / package).rglob("*.py")]
    found = [
        str(path.relative_to(ROOT))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if "sklearn" in imported_packages(node)
    ]
    assert len(files) > 200 and found == []


def imported_packages(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module]
    return {name.partition(".")[0] for name in names}


def test_packages_of_a_statement():
    statements = ast.parse("import sklearn.datasets as d, os\nfrom sklearn import svm\nfrom . import sklearn\nx = 1")
    assert [imported_packages(node) for node in statements.body] == [{"sklearn", "os"}, {"sklearn"}, set(), set()]
