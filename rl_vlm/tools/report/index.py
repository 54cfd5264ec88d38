"""`index.html`: a table of all runs in a directory, each with its verdict and a link to its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rl_vlm.errors import ConfigError
from rl_vlm.log.curve import metric_points
from rl_vlm.log.directory import REPORT
from rl_vlm.log.files import METRICS
from rl_vlm.tools.report.build import SOURCE, now, template, write_page
from rl_vlm.tools.report.draw import sparkline
from rl_vlm.tools.report.read import RunResults, holds_results, place_of, read_folder
from rl_vlm.tools.report.verdict import TRAINING, RunRow, verdict_of

INDEX = "index.html"
HELD_OUT = "Held-out reward"


def holds_a_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or holds_results(folder) or holds_results(folder / "evaluation")


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of runs and evaluations in a directory, the latest first.

    Return an empty list if the directory holds none, or is itself the directory of one.
    """
    if holds_a_run(folder) or not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and holds_a_run(path)]
    return sorted(found, key=lambda path: (-changed_at(path), path.name))


def changed_at(folder: Path) -> float:
    """Return the time at which a run last wrote metrics, or at which an evaluation was written."""
    place = place_of(folder)
    return (place / METRICS if (place / METRICS).is_file() else place).stat().st_mtime


def write_index(folders: Sequence[Path], path: Path) -> None:
    """Write the index of runs. Raises ConfigError if the file cannot be written."""
    write_page(build_index(folders, path), path)


def build_index(folders: Sequence[Path], path: Path) -> str:
    """Build the page. Links are relative to `path`, the file that it is for."""
    rows, notes = [], []
    for folder in folders:
        try:
            runs = read_folder(folder, with_rows=False)
        except ConfigError as error:
            notes.append(str(error))
            continue
        rows += [row_of(run, folder, path) for run in runs]
        notes += [f"{run.name}: {note}" for run in runs for note in run.notes]
    return template("index.html.jinja").render(
        title=path.absolute().parent.name,
        built=now(),
        rows=rows,
        columns=[HELD_OUT, TRAINING],
        notes=notes,
        style=(SOURCE / "page.css").read_text(),
    )


def row_of(run: RunResults, folder: Path, path: Path) -> RunRow:
    """Return the row of a run. It has a link if the run has a report."""
    judged = verdict_of(run)
    held_out = next((moved for moved in judged.moved if moved.split == "held-out"), None)
    report = place_of(folder) / REPORT
    link = quote(os.path.relpath(report.absolute(), path.absolute().parent)) if report.is_file() else None
    return RunRow(
        judged,
        [held_out, judged.by_label.get(TRAINING)],
        link,
        sparkline(metric_points(run.lines, "reward"), TRAINING),
    )
