"""Records and tables of docs/gallery.md."""

import json
from pathlib import Path

from benchmarks import gallery
from benchmarks.gallery import Curve, answers, curve_of, curves_table, draw
from rl_vlm.log.completions import write_rows
from tests.helpers.run_directory import completion_row

CURVE = Curve(seed=3, steps=[0, 20, 40], scores=[0.1, 0.5, 0.942], seconds=61.7, verdict="learned")


def test_a_run_is_recorded_by_its_held_out_scores(tmp_path: Path):
    lines = [{"step": 0, "eval_rewards/iou/mean": 0.10001}, {"step": 1, "reward": 0.3}]
    lines += [{"step": 2, "reward": 0.4, "eval_rewards/iou/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"train_seconds": 12.34, "verdict": {"outcome": "learned"}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text("train: {seed: 7}\n")
    assert curve_of(tmp_path, "iou") == Curve(7, [0, 2], [0.1, 0.5], 12.3, "learned")


def test_the_table_of_seeds():
    assert curves_table([CURVE]).splitlines()[2] == "| 3 | 0.10 | 0.94 | 40 | 62 | learned |"


def test_answers_are_those_before_and_after_the_run(tmp_path: Path):
    for step, text in ((0, "<answer>1</answer>"), (9, "<answer>7</answer>")):
        more = {"completion": text, "images": ["images/a.jpg"], "data/solution": "7"}
        without = {"completion": text, "images": None, "data/solution": "7"}
        rows = [completion_row(step, 0, 0, 0.0, more), completion_row(step, 1, 0, 0.0, without)]
        write_rows(tmp_path / f"completions/held_out_{step:05d}.parquet", rows)
    image = tmp_path / "completions/images/a.jpg"
    assert answers(tmp_path) == [{"image": image, "solution": "7", "before": "1", "after": "7"}]


def test_curves_are_drawn_without_images(tmp_path: Path):
    draw([], [CURVE], "iou", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_tables_of_the_records():
    assert set(gallery.records()) == {"grounding", "digits", "look_closer", "large", "collapsed"}
    assert gallery.update_page(gallery.PAGE.read_text()) == gallery.PAGE.read_text()
