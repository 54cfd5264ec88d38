import json
import os
import re
from pathlib import Path

import pytest

from launch import cli
from rl_vlm.log.completions import write_rows
from rl_vlm.tools.report.index import build_index, runs_in
from tests.helpers.run_directory import completion_row, write_run
from tests.unit.tools.report.test_verdict import learning_run


def write_evaluation(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_rows(folder / "completions.parquet", [completion_row(0, 0, 0, 1.0)])
    (folder / "summary.json").write_text(json.dumps({"num_samples": 1.0, "rewards/exact_match/mean": 1.0}))


def cells(page: str) -> list[list[str]]:
    rows = re.findall(r"(?s)<tr>(.*?)</tr>", page.partition("<tbody>")[2])
    return [[" ".join(re.sub("<.*?>", " ", cell).split()) for cell in re.split("</t[hd]>", row)[:-1]] for row in rows]


def test_the_index_lists_runs_and_evaluations_with_links_to_their_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = tmp_path / "runs"
    learned, short = learning_run(runs / "learned 1"), write_run(runs / "short")
    (short / "summary.json").unlink()
    (learned / "report.html").touch()
    write_evaluation(runs / "evaluated" / "evaluation")
    (runs / "empty").mkdir()
    for age, folder in enumerate((learned / "metrics.jsonl", short / "metrics.jsonl", runs / "evaluated/evaluation")):
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert cli.main(["report", str(runs)]) == 0
    assert capsys.readouterr().out == f"The index of 3 runs is {runs / 'index.html'}\n"
    page = (runs / "index.html").read_text()
    assert cells(page) == [
        ["learned 1", "↑ Learned", "0.00 → 1.00 +1.00 to +1.00", "0.28 → 0.78 +0.38 to +0.63", "20 of 2", "2.0", ""],
        ["short", "? Too short to tell not complete", "0.10 → 0.90 Held-out exact_match the latter: 0.00 to 0.50",
         "0.25 → 0.75 too few values (1)", "2 of 2", "0.1", ""],
        ["evaluated", "% Evaluated on 1 sample", "1.00 Held-out exact_match", "–", "–", "–", ""],
    ]  # fmt: skip
    assert re.findall('href="([^"]*)"', page) == ["learned%201/report.html"]
    assert page.count('<svg class="spark"') == 2
    assert "script-src 'none'" in page and "<script" not in page


def test_links_start_from_the_file_of_the_index(tmp_path: Path):
    folder = write_run(tmp_path / "runs" / "a")
    (folder / "report.html").touch()
    assert 'href="../runs/a/report.html"' in build_index([folder], tmp_path / "pages" / "index.html")


def test_a_run_is_no_directory_of_runs(tmp_path: Path):
    run = write_run(tmp_path / "run")
    write_run(run / "inner")
    assert runs_in(run) == []
    assert runs_in(tmp_path / "absent") == []
    assert runs_in(tmp_path) == [run]


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path):
    write_run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "comparison.json").write_text("{}")
    (tmp_path / "a" / "config.yaml").write_text("[")
    page = build_index(runs_in(tmp_path), tmp_path / "index.html")
    assert len(cells(page)) == 1
    assert "names no evaluation" in page and "a: config.yaml: " in page
