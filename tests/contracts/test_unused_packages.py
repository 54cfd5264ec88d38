"""A run imports no package that it does not use, such as DeepSpeed, which prints lines and takes seconds."""

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

class Imports:
    '''Records the files that import scikit-learn. Transformers does so itself.'''
    files = set()

    def find_spec(self, name, path, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if name.partition(".")[0] == "sklearn":
            self.files.add(frame.f_code.co_filename)

sys.meta_path.insert(0, Imports())
from rl_vlm.run.instrument import Instrument
from rl_vlm.run.run import train
from rl_vlm.tools.instruments import INSTRUMENTS
from tests.helpers.tiny_run import make_config

class Watch(Instrument):
    found = []

    def after_step(self, is_last):
        self.found.append(sorted(name for name in sys.argv[3:] if name in sys.modules))

train(make_config(sys.argv[1], Path(sys.argv[2]), max_steps=2), [*INSTRUMENTS, lambda observed: Watch()])
print(json.dumps([Watch.found, sorted(Imports.files), "matplotlib" in sys.modules]))
"""


@pytest.mark.ci
def test_a_run_imports_no_package_that_it_does_not_use(tmp_path: Path):
    checkpoint = build_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path / "run"), *NOT_USED]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found, files, draws = json.loads(result.stdout)
    assert found == [[], []]
    assert [file for file in files if file.startswith((f"{ROOT}/rl_vlm/", f"{ROOT}/rewards/"))] == []
    assert draws
    assert "Setting accelerator" not in result.stdout + result.stderr
