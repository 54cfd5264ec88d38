"""The notebook in `examples/` runs as it is written, with fewer steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_STEPS = "max_steps = 112\n"


def texts(cell: Any) -> str:
    """All text that a cell has printed or returned."""
    return "".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def test_it_has_ten_cells_without_outputs():
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 10
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.ci
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel to run a notebook")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    shutil.copytree(EXAMPLES / "digits", tmp_path / "digits")
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel to run a notebook")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    (made,) = [cell for cell in notebook.cells if MAX_STEPS in cell.source]
    made.source = made.source.replace(MAX_STEPS, "max_steps = 2\n")
    client.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()

    cells = {cell.id: cell for cell in notebook.cells}
    assert "1347 scans to train on, 450 held out" in texts(cells["data"])
    shown = texts(cells["train"])
    assert "2/2 [" in shown and "held-out right_digit=" in shown  # the bar, which is not one line per step
    assert "step 1/2, " not in shown
    assert "held-out accuracy: 0." in shown
    assert "'ci_low': 0." in texts(cells["evaluate"])
    for name in ("images", "curve", "answers"):
        assert any("image/png" in output.get("data", {}) for output in cells[name].outputs)
    (frame,) = cells["report"].outputs
    assert "<iframe srcdoc=" in frame["data"]["text/html"]
    assert (tmp_path / "runs" / "notebook" / "checkpoint-2" / "model.safetensors").is_file()
