"""The notebooks in `examples/` run as they are written, with fewer steps."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_STEPS = re.compile(r"^max_steps = \d+$", re.MULTILINE)
NUM_CELLS = {"notebook": 10, "own_images": 11}


def texts(cell: Any) -> str:
    """All text that a cell has printed or returned."""
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def has_picture(cell: Any) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a notebook with 2 steps in a folder that has the digits beside it, and return its cells by their ids."""
    client = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel to run a notebook")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel to run a notebook")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    shutil.copytree(EXAMPLES / "digits", folder / "digits")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    (made,) = [cell for cell in notebook.cells if MAX_STEPS.search(cell.source)]
    made.source = MAX_STEPS.sub("max_steps = 2", made.source)
    client.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: cell for cell in notebook.cells}


@pytest.mark.parametrize("name", NUM_CELLS)
def test_its_cells_have_no_outputs(name: str):
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) == NUM_CELLS[name]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.rglob("*.ipynb")} == set(NUM_CELLS)


@pytest.mark.slow
def test_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cells = executed("notebook", tmp_path, monkeypatch)
    assert "1347 scans to train on, 450 held out" in texts(cells["data"])
    shown = texts(cells["train"])
    assert "2/2 [" in shown and "held-out right_digit=" in shown  # the bar, which is not one line per step
    assert "step 1/2, " not in shown
    assert "held-out accuracy: 0." in shown
    assert "'ci_low': 0." in texts(cells["evaluate"])
    for name in ("images", "curve", "answers"):
        assert has_picture(cells[name])
    (frame,) = cells["report"].outputs
    assert "<iframe srcdoc=" in frame["data"]["text/html"]
    assert (tmp_path / "runs" / "notebook" / "checkpoint-2" / "model.safetensors").is_file()


def test_own_images_and_an_own_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cells = executed("own_images", tmp_path, monkeypatch)
    assert len(list((tmp_path / "my_images").glob("*.png"))) == 720
    assert "600 images to train on, 120 held out" in texts(cells["rows"])
    assert texts(cells["reward"]) == "[1.0, 0.1, 0.0, 0.0]"
    assert "2/2 [" in texts(cells["train"]) and "held-out right_count=" in texts(cells["train"])
    assert texts(cells["summary"]).startswith("Verdict: too short to tell. ")
    assert "2 optimizer steps took" in texts(cells["summary"])
    tables = [output["data"]["text/html"] for output in cells["rollouts"].outputs]
    assert len(tables) == 2 and all("<th>completion</th>" in table for table in tables)
    assert has_picture(cells["answers"])
    assert (tmp_path / "runs" / "my_images" / "checkpoint-2" / "model.safetensors").is_file()
