import base64
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from PIL import Image

from launch import cli
from rl_vlm.errors import ConfigError
from rl_vlm.log.completions import write_rows
from rl_vlm.log.images import PromptImages, is_kept
from rl_vlm.log.starts import append_start, command_line, read_starts
from rl_vlm.model.policy import Policy
from rl_vlm.tools.report.build import LiveReport, build_page, different_settings, reasons, write_report
from rl_vlm.tools.report.curves import charts_of
from rl_vlm.tools.report.diversity import diversity_of
from rl_vlm.tools.report.read import RunResults, own_names, read_runs, read_windows
from rl_vlm.tools.report.rollouts import browser_data, choose_groups, cut, data_uri, described_text, length_limit
from rl_vlm.types import Sample
from tests.helpers.run_directory import SETTINGS, completion_row, write_run

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_diversity_counts_answers_and_solved_prompts(tmp_path: Path):
    (run,) = read_runs([write_run(tmp_path / "run")])
    found = diversity_of(run, "exact_match")
    assert (found.function, found.distinct, found.num_prompts) == ("exact_match", "2.00 → 2.00", 2)
    assert [passes.rates for passes in found.passes] == [{1: 0.25, 2: 0.5}, {1: 0.75, 2: 1.0}]
    assert (found.never, found.always) == ([], [])


def test_a_function_says_from_which_score_a_completion_is_solved(tmp_path: Path):
    rewards = [{"function": "iou", "solved_from": 0.5}, {"function": "giou"}, {"function": "length", "weight": 0.1}]
    rows = [
        completion_row(0, 0, i, None, {"exact_match": None}) | {"iou": iou, "giou": 0.9, "length": 1.0}
        for i, iou in enumerate((0.4, 0.5))
    ]
    run = RunResults("run", tmp_path, "training", rows=rows, names=["iou", "giou", "length"],
                    settings={"rewards": {"reward_funcs": rewards}})  # fmt: skip
    assert run.decisive == ["iou", "giou"]
    by_iou, by_giou = (diversity_of(run, name) for name in run.decisive)
    assert (by_iou.passes[0].rates, by_iou.never) == ({1: 0.5, 2: 1.0}, [])
    assert (by_giou.passes[0].rates, by_giou.never) == ({1: 0.0, 2: 0.0}, ["row-0"])


def test_pass_rates_of_an_evaluation_are_those_of_its_summary(tmp_path: Path):
    rows = [completion_row(0, 0, 0, 1.0)]
    summary = {"rewards/exact_match/pass@1": 0.25, "rewards/exact_match/pass@2": 0.5, "rewards/exact_match/mean": 0.2}
    run = RunResults("eval", tmp_path, "evaluation", rows=rows, names=["exact_match"], summary=summary)
    assert diversity_of(run, "exact_match").passes[0].rates == {1: 0.25, 2: 0.5}


def test_groups_of_all_windows_are_shown_the_same_prompts_each_time():
    rows = [completion_row(step, p, i, 0.0, {"images": None}) for step in range(3) for p in range(8) for i in range(2)]
    ids = [[group[0]["sample_id"] for group in choose_groups(rows, most)] for most in (12, 48)]
    assert ids[0][:2] == ids[0][2:4] == ids[0][4:]
    assert len(ids[1]) == 24


def test_of_many_windows_the_first_and_the_last_are_shown():
    rows = [completion_row(step, 0, i, 0.0, {"images": None}) for step in range(10) for i in range(2)]
    assert [group[0]["step"] for group in choose_groups(rows, 8)] == [0, 3, 6, 9]
    assert [group[0]["step"] for group in choose_groups(rows[:16], 8)] == [0, 2, 4, 6, 7]


def test_held_out_rollouts_of_a_run_are_apart_from_its_training(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (before,) = read_runs([folder])
    for step in (0, 2):
        write_rows(folder / f"completions/held_out_{step:05d}.parquet", [completion_row(step, 7, 0, 0.0, {})])
    (run,) = read_runs([folder])
    assert diversity_of(run, "exact_match") == diversity_of(before, "exact_match")
    assert charts_of([run]).first == charts_of([before]).first
    data = browser_data([run])
    assert [(group["step"], group["id"]) for group in data["groups"] if group["heldOut"]] == [
        (0, "row-7"),
        (2, "row-7"),
    ]
    assert sum(not group["heldOut"] for group in data["groups"]) == len(browser_data([before])["groups"])
    assert data["numAll"] == before.num_rows + 2 == data["numShown"]


def test_prompts_whose_images_are_kept_come_first():
    rows = [completion_row(0, p, 0, 0.0, {"images": ["images/a.jpg"] if p == 5 else None}) for p in range(8)]
    assert [group[0]["sample_id"] for group in choose_groups(rows, 1)] == ["row-5"]


def test_texts_share_a_budget_and_lose_their_middle():
    assert length_limit([10, 10, 100], 60) == 40
    assert length_limit([10, 10], 60) == 10
    text = "a" * 50 + "b" * 50
    assert cut(text, 40) == "a" * 20 + "\n[… 60 characters left out …]\n" + "b" * 20
    assert cut("short", 40) == "short"


def test_boxes_are_in_pixels_of_the_original_image(tmp_path: Path):
    settings = SETTINGS | {"rewards": {"reward_funcs": [{"function": "iou"}]}}
    boxes = {"completion": "<answer>[20, 10, 60, 30]</answer>", "data/solution": "[10, 5, 30, 15]"}
    records = read_runs([write_run(tmp_path / "run", settings, boxes)])
    group = browser_data(records)["groups"][0]
    assert group["gold"] == [{"at": [10.0, 5.0, 30.0, 15.0], "label": None}]  # `original`
    assert group["rows"][0]["regions"] == [{"at": [10.0, 5.0, 30.0, 15.0], "label": None}]  # `absolute`: twice as large
    per_mille = {"function": "iou", "kwargs": {"coordinates": "per_mille"}}
    settings = SETTINGS | {"rewards": {"reward_funcs": [per_mille]}}
    boxes = {"completion": "[250, 250, 750, 750]"}
    group = browser_data(read_runs([write_run(tmp_path / "other", settings, boxes)]))["groups"][0]
    assert group["rows"][0]["regions"] == [{"at": [10.0, 5.0, 30.0, 15.0], "label": None}]


def test_a_video_is_a_strip_with_intervals(tmp_path: Path):
    settings = SETTINGS | {"rewards": {"reward_funcs": [{"function": "temporal_iou"}]}}
    columns = {
        "images": None, "image_sizes": [], "videos": ["images/strip.jpg"], "video_duration": [12.0],
        "video_frame_times": [[2.0, 4.0, 6.0, 8.0]], "completion": "<answer>3 to 5.25</answer>",
        "data/solution": "[2.5, 7]",
    }  # fmt: skip
    folder = write_run(tmp_path / "run", settings, columns)
    Image.new("RGB", (1000, 96)).save(folder / "completions/images/strip.jpg")
    data = browser_data(read_runs([folder]))
    group = data["groups"][0]
    assert group["videos"] == [{"strip": 0, "from": 0.0, "to": 10.0}]  # a step of 2 s before and after its frames
    assert (group["goldIntervals"], group["rows"][0]["intervals"]) == ([[2.5, 7.0]], [[3.0, 5.25]])
    assert (group["images"], group["noImage"], len(data["images"])) == ([], False, 1)
    content = base64.b64decode(data["images"][0].partition(",")[2])
    with Image.open(io.BytesIO(content)) as shown:
        assert shown.size == (1000, 96)
    gone = columns | {"videos": None, "video_frame_times": [[0.0]]}
    group = browser_data(read_runs([write_run(tmp_path / "other", settings, gone)]))["groups"][0]
    assert group["videos"] == [{"strip": None, "from": 0.0, "to": 12.0}]


def test_a_page_can_show_fewer_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, small = write_run(tmp_path / "run"), tmp_path / "small.html"
    data = browser_data(read_runs([folder]))
    fewer = browser_data(read_runs([folder]), most=4)
    assert (data["numShown"], fewer["numShown"]) == (8, 4)
    write_report([folder], small, most=4)
    assert '"numShown":4,' in small.read_text()
    with mock.patch("rl_vlm.tools.report.build.write_report") as write:
        assert cli.main(["report", str(folder), "--completions", "100"]) == 0
    assert write.call_args.kwargs == {"most": 100}
    with pytest.raises(SystemExit):
        cli.main(["report", str(folder), "--completions", "5"])
    assert "'5' is no whole number of 100 or more" in capsys.readouterr().err


def test_each_image_is_on_the_page_once(tmp_path: Path):
    data = browser_data(read_runs([write_run(tmp_path / "run")]))
    assert len(data["images"]) == 2
    assert sorted(tuple(group["images"]) for group in data["groups"]) == [(0,), (0,), (1,), (1,)]
    assert all(uri.startswith("data:image/jpeg;base64,") for uri in data["images"])


def test_runs_of_a_comparison_share_images(tmp_path: Path):
    data = browser_data(read_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b")]))
    assert len(data["images"]) == 2
    assert sorted(group["images"][0] for group in data["groups"]) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_each_image_is_in_the_file_once_though_the_list_shows_it_too(tmp_path: Path):
    page = build_page(read_runs([write_run(tmp_path / "run")]))
    assert page.count("data:image/jpeg;base64,") == 2


def test_a_missing_or_damaged_image_is_left_out(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "completions" / "images" / "0.jpg").write_bytes(b"damaged")
    (folder / "completions" / "images" / "1.jpg").unlink()
    data = browser_data(read_runs([folder]))
    assert data["images"] == []
    assert all(group["noImage"] for group in data["groups"])


@pytest.mark.parametrize(
    "where", ["completion", "prompt", "sample_id", "data/data_source", "fault", "finish_reason", "data/x", "f/logged"]
)
def test_markup_in_completions_files_is_inert(where: str, tmp_path: Path):
    page = build_page(read_runs([write_run(tmp_path / "run", more={where: ATTACK})]))
    assert_inert(page)
    assert ATTACK in json.dumps(page_data(page), ensure_ascii=False)


def test_markup_elsewhere_is_inert(tmp_path: Path):
    folder = write_run(tmp_path / "<script>alert(1)<", SETTINGS | {"log": {"run_name": ATTACK}})
    run = json.dumps({"data": "d", "sample_id": ATTACK, "reason": ATTACK})
    (folder / "dropped_prompts.jsonl").write_text(run + "\n")
    start = {"command": ATTACK, "folder": ATTACK, "started": "", "processes": 1, "device": ATTACK, "platform": ""}
    (folder / "starts.jsonl").write_text(json.dumps(start | {"python": "", "packages": {ATTACK: ATTACK}}) + "\n")
    function = ATTACK.replace("/", "")  # a function's name has no slash
    line = {"step": 3, f"rewards/{function}/mean": 1.0, f"reward_faults/{ATTACK}": 1.0, f"time/{ATTACK}": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line | {"time/step": 1.0}) + "\n")
    assert_inert(build_page(read_runs([folder])))


def assert_inert(page: str) -> None:
    """No markup of `ATTACK` stands in the page, and no element but those of the template."""
    assert "<img" not in page
    assert "<script>alert" not in page
    assert page.count("<script") == 2 == page.count("</script>")


def test_the_page_may_load_nothing(tmp_path: Path):
    page = build_page(read_runs([write_run(tmp_path / "run")]))
    assert "default-src 'none'; img-src data:" in page
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", page)


def test_values_that_json_does_not_have_are_none(tmp_path: Path):
    values = {"reward": float("inf"), "advantage": float("nan")}
    page = build_page(read_runs([write_run(tmp_path / "run", more=values)]))
    assert page_data(page)["groups"][0]["rows"][0]["advantage"] is None


def test_several_runs_are_compared(tmp_path: Path):
    other = SETTINGS | {"train": {"max_steps": 3, "output_dir": "elsewhere"}}
    folders = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", other)]
    records = read_runs(folders)
    assert [run.name for run in records] == ["a/run", "b/run"]
    assert different_settings(records) == [("train.max_steps", ["2", "3"])]
    labels = [series.label for series in charts_of(records).first[0].series]
    assert labels == ["a/run", "b/run"]
    write_report(folders, tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.index("Verdicts by run") < page.index("Settings that differ") < page.index("train.max_steps")
    columns = re.findall(r'<th scope="col" class="number">(.*?)</th>', page.partition("</thead>")[0])
    assert columns == ["Training reward", "Held-out exact_match", "steps", "minutes"]


def test_the_command_writes_it_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(tmp_path / "run")
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"The report is {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(folder / "completions")]) == 2
    assert "holds neither a run (metrics.jsonl) nor an evaluation" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        read_runs([tmp_path / "nothing"])


def test_a_failure_is_logged_and_never_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    report = LiveReport(tmp_path)  # which holds no run
    with caplog.at_level(logging.WARNING):
        report.refresh(is_last=True)
        report.refresh(is_last=True)
    assert caplog.text.count("the report was not written") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "summary.json", "starts.jsonl", "dropped_prompts.jsonl", "completions/completions_00001.parquet"],
)
@pytest.mark.parametrize("content", [b"", b"[1\n", b"3\n"])
def test_a_damaged_file_is_named_on_the_page(tmp_path: Path, name: str, content: bytes):
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    (run,) = read_runs([folder])
    page = build_page([run])
    is_empty_list = content == b"" and name.endswith(".jsonl")
    assert is_empty_list or Path(name).name in page.partition("could not be read")[2].partition("</section>")[0]
    assert len(run.rows) == (4 if "parquet" in name else 8)


def test_starts_of_other_versions_may_have_fewer_entries(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "starts.jsonl").write_text('{"command": "rl-vlm train a.yaml"}\n')
    assert "rl-vlm train a.yaml" in build_page(read_runs([folder]))


@pytest.mark.parametrize("output", ["missing/report.html", "."])
def test_an_output_that_cannot_be_written_is_an_error_of_the_settings(tmp_path: Path, output: str):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([write_run(tmp_path / "run")], tmp_path / output)


def test_an_output_that_is_no_file_is_written_to_and_not_replaced(tmp_path: Path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_report([write_run(tmp_path / "run")], pipe)
    reader.join(10)
    assert pipe.is_fifo() and read[0].startswith("<!doctype html>")
    assert not list(tmp_path.glob("*.tmp"))


def test_names_become_paths_until_they_differ():
    paths = [Path("/x/e/last"), Path("/y/e/last"), Path("/y/e/first")]
    assert own_names(["last", "last", "first"], paths) == ["x/e/last", "y/e/last", "first"]
    assert own_names(["a", "a"], [Path("/x/a")] * 2) == ["//x/a"] * 2


def test_groups_at_even_distances_of_a_large_evaluation_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [completion_row(0, p, i, 0.0) for p in range(9) for i in range(2)]
    write_rows(tmp_path / "completions.parquet", rows)
    read = lambda most: read_windows([tmp_path / "completions.parquet"], most, [])  # noqa: E731
    assert [len(found) for found, _ in map(read, (18, 9, 6))] == [18, 10, 6]
    assert [row["sample_id"] for row in read(6)[0][::2]] == ["row-0", "row-3", "row-6"]
    monkeypatch.setattr("rl_vlm.tools.report.read.MOST_BYTES", 1000)
    assert len(read(18)[0]) < 18 and read(18)[1] == 18


def test_reasons_that_differ_in_numbers_are_one_and_rare_ones_are_counted():
    dropped = [{"reason": f"{i} tokens are too many", "sample_id": str(i)} for i in range(5)]
    dropped += [{"reason": "x" * i, "sample_id": "?"} for i in range(1, 41)]
    found = reasons(dropped)
    assert found[0] == ("0 tokens are too many", 5, ["0", "1", "2"])
    assert found[-1] == ("11 other reasons", 11, [])
    assert sum(count for _, count, _ in found) == 45


def test_thinking_is_split_before_texts_are_cut():
    text = "<think>" + "a" * 500 + "</think> The answer is 7."
    found = described_text(text, 100)
    assert (found["text"], found["thoughtLength"]) == ("The answer is 7.", 500)
    assert len(found["thought"]) < 150
    assert described_text("begun</think>7", 99) == {"before": "", "thought": "begun", "thoughtLength": 5, "text": "7"}
    found = described_text("It is <think>hm</think> 7", 99)
    assert (found["before"], found["thought"], found["text"]) == ("It is", "hm", "7")
    assert described_text("<think>never ends", 99)["thought"] == "never ends"
    assert described_text("7", 99) == {"text": "7"}


def test_boxes_and_logged_values_have_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"rewards": {"reward_funcs": ["iou"]}}
    boxes = json.dumps([{"bbox_2d": [1, 2, 3, 4]}] * 4)
    more = {"completion": boxes, "note": "n" * 200, "other": "o" * 200}
    records = read_runs([write_run(tmp_path / "run", settings, more)])
    rows = [row for group in browser_data(records)["groups"] for row in group["rows"]]
    assert [(len(row["regions"]), len(row["logged"])) for row in rows] == [(4, 2)] * 8
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.ALL_REGIONS", 8)
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.CELL_BYTES", 8 * 210 + 4 * 40)
    rows = [row for group in browser_data(records)["groups"] for row in group["rows"]]
    assert [len(row["regions"]) for row in rows] == [1] * 8
    assert [row["logged"]["…"] for row in rows] == ["1 more left out"] * 8
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.REGION_SECONDS", 0.0)
    data = browser_data(records)
    assert data["numUnread"] == 8 and not any(row["regions"] for group in data["groups"] for row in group["rows"])


def test_an_image_that_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (run,) = read_runs([write_run(tmp_path / "run")])
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.MOST_PIXELS", 40 * 20 - 1)
    assert browser_data([run])["images"] == []
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.MOST_PIXELS", 40 * 20)
    assert len(browser_data([run])["images"]) == 2
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.MOST_FILE_BYTES", 100)
    assert browser_data([run])["images"] == []


def test_only_files_of_the_run_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    outside = tmp_path / "outside.jpg"
    Image.new("RGB", (8, 6), "red").save(outside)
    names = ["/dev/zero", "../../outside.jpg", str(outside), "images/link.jpg", "images/pipe.jpg", "images", "a" * 5000]
    folder = write_run(tmp_path / "run", more={"images": [*names, "images/../images/0.jpg", "nul\x00"]})
    (folder / "completions" / "images" / "link.jpg").symlink_to(outside)
    os.mkfifo(folder / "completions" / "images" / "pipe.jpg")
    opened = []
    monkeypatch.setattr("rl_vlm.tools.report.rollouts.data_uri", lambda path: opened.append(path) or "data:")
    (group, *_) = browser_data(read_runs([folder]))["groups"]
    assert [path.resolve() for path in opened] == [folder / "completions" / "images" / "0.jpg"]
    assert group["images"] == [None] * len(names) + [0, None]


@pytest.mark.ci
def test_ranks_record_the_command_of_their_launcher(tmp_path: Path):
    child = "from rl_vlm.log.starts import launcher_command; print(launcher_command())"
    launcher = tmp_path / "accelerate"
    launcher.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)")
    command = [sys.executable, str(launcher), "launch", "-m", "launch.train", "a b.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4])
    assert done.stdout == "accelerate launch -m launch.train 'a b.yaml'\n"


def test_the_page_of_a_run_reloads_itself_until_its_last_write(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    refresh = '<meta http-equiv="refresh" content="60">'
    report = LiveReport(folder)
    report.refresh()
    page = (folder / "report.html").read_text()
    assert refresh in page and "2 of 2 steps · 0.1 minutes · running" in page
    assert cli.main(["report", str(folder)]) == 0  # the run may be dead
    page = (folder / "report.html").read_text()
    assert refresh not in page and "not complete" in page and "Stop reloading" not in page
    report.refresh(is_last=True)
    assert refresh not in (folder / "report.html").read_text()


def test_a_report_is_not_due_right_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built = []
    monkeypatch.setattr("rl_vlm.tools.report.build.write_folder_report", lambda *_, **__: not built.append(1))
    clock = iter([0.0, 14.0, 15.0, 20.0, 269.0, 270.0, 270.0])  # a build of 5 s is followed by 250 s without one
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    report = LiveReport(tmp_path)  # before the models are loaded, which takes no seconds of this clock
    report.attach(mock.Mock(spec=Policy))
    for expected in (0, 1, 1, 2):
        report.refresh()
        assert len(built) == expected


def sample(sample_id: str, size: tuple[int, int]) -> Sample:
    return Sample(sample_id, [], [Image.new("L", size, 3)], {}, "")


def test_images_are_small_and_written_once(tmp_path: Path):
    images = PromptImages(tmp_path / "images", num_prompts=1)
    (first,) = images.write(sample("a", (2000, 1000)))["images"]
    assert images.write(sample("b", (2000, 1000))) == {"images": [first]}
    assert first.startswith("images/")
    with Image.open(tmp_path / first) as image:
        assert (image.size, image.mode) == ((448, 224), "RGB")
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_a_share_of_the_prompts_keeps_its_images():
    assert sum(is_kept(f"row-{i}", 0.1) for i in range(10_000)) == pytest.approx(1000, abs=100)
    assert is_kept("row-0", 1.0)


def test_starts_are_recorded(tmp_path: Path):
    append_start(tmp_path, 1, is_first=True)
    append_start(tmp_path, 2, is_first=False)
    first, second = read_starts(tmp_path)
    assert (first["processes"], second["processes"]) == (1, 2)
    assert first["packages"]["torch"].startswith("2.")
    append_start(tmp_path, 3, is_first=True)
    assert len(read_starts(tmp_path)) == 1


def test_the_command_can_be_typed():
    assert command_line(["/x/bin/rl-vlm", "train", "a b.yaml"]) == "rl-vlm train 'a b.yaml'"
    assert command_line(["/x/launch/train.py", "c.yaml"]) == "python -m launch.train c.yaml"
    assert command_line(["my/script.py"]) == "python my/script.py"


def test_secrets_in_settings_and_commands_are_not_on_the_page(tmp_path: Path):
    judge = {"function": "judge", "kwargs": {"api_key": "abc123secret"}}
    url = "https://user:hunter2@host/v1"
    settings = {"rewards": {"reward_funcs": [judge]}, "evaluation": {"endpoint_url": url}, "memory": {"tokens": 16384}}
    folders = [write_run(tmp_path / name, settings) for name in "ab"]
    (folders[1] / "config.yaml").write_text("evaluation:\n  endpoint_url: https://user:hunter3@host/v1\n")
    start = {"command": "rl-vlm train c.yaml hub_token=hf_abcdefghijkl", "folder": "/work", "started": "now"}
    start |= {"processes": 1, "device": "cpu", "platform": "linux", "python": "3.11", "packages": {}}
    (folders[0] / "starts.jsonl").write_text(json.dumps(start) + "\n")
    page = build_page(read_runs(folders))
    assert not [secret for secret in ("abc123secret", "hunter2", "hunter3", "hf_abcdefghijkl") if secret in page]
    assert "tokens: 16384" in page and "rl-vlm train c.yaml hub_token=***" in page


def test_a_missing_image_does_not_move_the_boxes_to_another_one(tmp_path: Path):
    folder = write_run(tmp_path / "run", more={"images": ["images/gone.jpg", "images/1.jpg"]})
    (group, *_) = browser_data(read_runs([folder]))["groups"]
    assert group["images"] == [None, 0] and not group["noImage"]


def test_images_stand_upright_and_say_nothing_of_where_they_were_taken(tmp_path: Path):
    image, exif = Image.new("RGB", (40, 20)), Image.Exif()
    exif[0x0112] = 6  # Orientation: to be turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif)
    content = base64.b64decode(data_uri(tmp_path / "turned.jpg").partition(",")[2])
    with Image.open(io.BytesIO(content)) as shown:
        assert shown.size == (20, 40) and not shown.getexif()
