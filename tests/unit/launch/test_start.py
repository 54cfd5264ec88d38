"""The first line of a command, and garbage collection while modules are imported."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.start import importing

CONFIG = """
model: {model_name_or_path: tiny}
data: {dataset_name: [ours.jsonl, theirs.jsonl], eval_dataset_name: held_out.jsonl}
rewards: {reward_funcs: choice}
train: {output_dir: runs/first}
"""
PROGRAM = """
import json, os, sys, time

class FirstLine:
    def write(self, text):
        heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
        print(json.dumps([text, heavy, time.process_time()]), flush=True)
        os._exit(0)

sys.stderr = FirstLine()
from launch.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train", "training tiny on ours.jsonl, theirs.jsonl, into runs/first; importing torch and transformers first"),
        ("eval", "evaluating tiny on held_out.jsonl, into runs/first; importing torch and transformers first"),
    ],
)
def test_the_first_line_comes_before_torch(command: str, line: str, tmp_path: Path):
    """It takes 0.2 s of CPU time, or 0.4 without bytecode. The bound leaves room for slow machines."""
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    result = subprocess.run([sys.executable, "-c", PROGRAM, command, str(path)], capture_output=True, check=True)
    printed, heavy, seconds = json.loads(result.stdout)
    assert (printed, heavy) == (line, [])
    assert seconds < 2


def test_objects_of_imported_modules_are_left_out_of_collections():
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()


def test_collections_go_on_after_an_import_that_fails():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
