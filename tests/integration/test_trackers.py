"""What trackers store of rollouts, read back from their own files. Nothing is sent over the network."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from rl_vlm.config.schema import LogConfig
from rl_vlm.distributed.trackers import RolloutTable, Trackers


@pytest.fixture
def table(tmp_path: Path) -> RolloutTable:
    """A row with a red image, and a row without an image whose first reward does not apply."""
    path = tmp_path / "red.jpg"
    Image.new("RGB", (8, 6), "red").save(path)
    columns = ["image", "step", "prompt", "completion", "exact", "reward"]
    return RolloutTable(
        columns,
        [[path, 3, "user: <image> colour?", "<a>|red\nyes", 1.0, 1.0], [None, 3, "user: hi", "no", None, 0.5]],
    )


def send(tracker: str, table: RolloutTable, folder: Path) -> None:
    trackers = Trackers(LogConfig(report_to=[tracker]), str(folder))
    trackers.start("colours", {"train": {"max_steps": 4}})
    trackers.report({"reward": 0.75}, 3)
    trackers.report_rollouts(table, 3)
    trackers.close()


def test_tensorboard(table, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send("tensorboard", table, tmp_path)
    (events,) = (tmp_path / "colours").glob("events.*")
    found = EventAccumulator(str(events)).Reload()
    (text,) = found.Tensors("rollouts/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode().splitlines()) == (3, [
        "| image | step | prompt | completion | exact | reward |",
        "| --- | --- | --- | --- | --- | --- |",
        "| rollouts/0 | 3 | user: <image> colour? | <a>\\|red<br>yes | 1.0 | 1.0 |",
        "| None | 3 | user: hi | no | None | 0.5 |",
    ])  # fmt: skip
    (image,) = found.Images("rollouts/0")
    assert (image.step, image.width, image.height) == (3, 8, 6)


def test_wandb(table, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    send("wandb", table, tmp_path)
    # The table with its images is an artifact. Beside it, wandb writes a copy with the word "Image" for an image.
    files = [path.read_bytes() for path in (tmp_path / "artifacts" / "staging").iterdir()]
    assert (tmp_path / "red.jpg").read_bytes() in files
    stored = next(json.loads(content) for content in files if content.startswith(b"{"))
    assert stored["columns"] == table.columns
    image, *values = stored["data"][0]
    assert (image["_type"], image["width"], image["height"]) == ("image-file", 8, 6)
    assert values == [3, "user: <image> colour?", "<a>|red\nyes", 1.0, 1.0]
    assert stored["data"][1] == [None, 3, "user: hi", "no", None, 0.5]


def test_trackio(table, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio", reason="needs trackio")
    send("trackio", table, tmp_path)
    with closing(sqlite3.connect(tmp_path / "trackio" / "colours.db")) as database:
        stored = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
    (step, metrics), (step_of_rollouts, rollouts) = stored
    assert (step, step_of_rollouts, metrics) == (3, 3, {"reward": 0.75})
    first, second = rollouts["rollouts"]["_value"]
    assert list(first) == table.columns
    image = tmp_path / "trackio" / "media" / first.pop("image")["file_path"]
    assert image.read_bytes() == (tmp_path / "red.jpg").read_bytes()
    assert list(first.values()) == [3, "user: <image> colour?", "<a>|red\nyes", 1.0, 1.0]
    assert list(second.values()) == [None, 3, "user: hi", "no", None, 0.5]


def test_an_error_of_a_tracker_does_not_end_the_run(table, tmp_path, caplog):
    (tmp_path / "red.jpg").unlink()
    with caplog.at_level(logging.WARNING):
        send("tensorboard", table, tmp_path)
    assert "rollouts of step 3 were not sent to tensorboard" in caplog.text


def test_a_tracker_without_tables_gets_metrics_alone(table, tmp_path, caplog):
    class Other:
        name = "mlflow"

        def log(self, values: dict[str, float], step: int) -> None:
            sent.append((values, step))

    sent: list[tuple[dict[str, float], int]] = []
    trackers = Trackers(LogConfig(), str(tmp_path))
    trackers.accelerator.trackers = [Other()]
    trackers.report({"reward": 0.75}, 3)
    trackers.report_rollouts(table, 3)
    assert sent == [({"reward": 0.75}, 3)]
    assert caplog.messages == []
