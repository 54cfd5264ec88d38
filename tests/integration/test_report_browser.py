"""The report in headless Chromium: nothing is loaded, nothing of a run is executed, and keys reach everything.

It needs the package playwright, and Chromium: `pip install playwright`, and `playwright install chromium` or a chromium
of the system.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_vlm.log.completions import window_path, write_rows
from rl_vlm.tools.report.build import write_report
from rl_vlm.tools.report.index import runs_in, write_index
from tests.helpers.run_directory import SETTINGS, completion_row, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


ATTACK = "<think>I see <b>it</b></think><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
BOXES = {"completion": f"{ATTACK}<answer>[20, 10, 60, 30]</answer>", "data/solution": "[10, 5, 30, 15]"}
IOU = SETTINGS | {"rewards": {"reward_funcs": [{"function": "iou", "name": "exact_match"}]}}


@dataclass
class Opened:
    """A page with what it printed and asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"Chromium cannot be started: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light")], ids=["desktop", "dark", "phone"])
def opened(request: pytest.FixtureRequest, chromium: Any, tmp_path: Path) -> Iterator[Opened]:
    width, scheme = request.param
    write_report([write_run(tmp_path / "run", IOU, BOXES)], tmp_path / "report.html")
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.problems.append(message.text))
    found.page.on("pageerror", lambda error: found.problems.append(str(error)))
    found.page.on("request", lambda request: found.problems.append(request.url) if is_foreign(request.url) else None)
    found.page.goto((tmp_path / "report.html").as_uri())
    yield found
    assert found.problems == []
    context.close()


def is_foreign(url: str) -> bool:
    return not (url.startswith("data:") or (url.startswith("file:") and "/report.html" in url))


def test_nothing_is_executed_or_loaded_and_nothing_is_wider_than_the_screen(opened: Opened):
    assert opened.page.evaluate("window.hit") is None
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    texts = opened.page.locator(".completion").first.inner_text()
    assert "<script>window.hit = 1</script>" in texts
    assert "I see" not in texts  # the thinking is folded
    assert opened.page.locator("#group img").evaluate("image => image.naturalWidth") == 40


def test_boxes_are_drawn_where_they_are(opened: Opened):
    drawn = opened.page.locator("#regions rect.gold, #regions rect.predicted")
    values = [[rect.get_attribute(name) for name in ("x", "y", "width", "height")] for rect in drawn.all()]
    assert values == [["10", "5", "20", "10"]] * 2
    image, svg = opened.page.locator("#group img").bounding_box(), opened.page.locator("#regions").bounding_box()
    assert (svg["x"], svg["y"]) == (image["x"], image["y"])
    assert svg["width"] == pytest.approx(image["width"], abs=1)


def test_keys_walk_through_groups_and_completions(opened: Opened):
    page = opened.page
    title = page.locator("#group h3").first
    first = title.inner_text()
    page.keyboard.press("j")
    second = title.inner_text()
    assert second != first
    assert page.evaluate("document.activeElement.closest('#groups') !== null")
    page.keyboard.press("ArrowDown")
    assert title.inner_text() not in (first, second)
    page.keyboard.press("Home")
    assert title.inner_text() == first
    page.keyboard.press("n")
    assert page.locator("#whose").inner_text() == "predicted by #1"
    assert page.evaluate("document.activeElement.className") == "completion"
    page.keyboard.press("Tab")  # to the folded thinking
    page.keyboard.press("Enter")
    assert page.locator(".completion details[open]").count() == 1


def test_tab_reaches_the_charts_and_arrows_read_them(opened: Opened):
    page = opened.page
    unfold_filters(page)
    page.locator("figure[data-chart] svg").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".reading").first.inner_text() == "step 1: training 0.25"
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('class')"))
    assert {"f-step", "f-source", "f-score", "f-low", "f-high", "f-text", "sort", "link", "prompt", "scroll"} <= reached


def test_curves_over_minutes_on_a_log_scale_and_smoothed(opened: Opened):
    page = opened.page
    chart = page.locator("figure[data-chart]").first
    before = chart.locator("path.line:not(.band)").get_attribute("d")
    page.select_option("#axis", "minutes")
    chart.locator("svg").focus()
    page.keyboard.press("End")
    assert chart.locator(".reading").inner_text() == "0.0667 minutes, step 2: training 0.75"  # two steps of 2 s
    assert page.locator("#axis option").all_inner_texts() == ["optimizer steps", "minutes of steps"]  # no tokens
    page.select_option("#axis", "step")
    assert chart.locator("path.line:not(.band)").get_attribute("d") == before
    page.locator("#log").check()
    logarithmic = chart.locator("path.line:not(.band)").get_attribute("d")
    assert logarithmic != before
    page.locator("#smooth").fill("50")
    assert chart.locator("path.raw").get_attribute("d") == logarithmic
    # half of 0.75, and a quarter of 0.25 over the weights so far, 3/4: 0.583 lies between 0.25 and 0.75
    heights = [chart.locator("path.line:not(.band)").nth(i).get_attribute("d").split("L")[1].split()[1] for i in (0, 1)]
    assert float(heights[1]) > float(heights[0])


def test_a_video_is_a_strip_above_two_bars(chromium: Any, tmp_path: Path):
    settings = SETTINGS | {"rewards": {"reward_funcs": [{"function": "temporal_iou"}]}}
    columns = {
        "images": None, "image_sizes": [], "videos": ["images/strip.jpg"], "video_duration": [8.0],
        "video_frame_times": [[0.0, 2.0, 4.0, 6.0]], "completion": "<answer>2 to 4</answer>", "data/solution": "[4, 8]",
    }  # fmt: skip
    folder = write_run(tmp_path / "run", settings, columns)
    Image.new("RGB", (518, 96), "green").save(folder / "completions/images/strip.jpg")
    write_report([folder], tmp_path / "report.html")
    page = chromium.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    strip = page.locator(".film img").bounding_box()
    assert (strip["width"], strip["height"]) == (518, 96)
    bars = [page.locator(f".bar-of .{kind}").bounding_box() for kind in ("gold", "predicted")]
    for bar, start, end in zip(bars, (4, 2), (8, 4), strict=True):
        assert bar["x"] - strip["x"] == pytest.approx(start / 8 * 518, abs=1)
        assert bar["width"] == pytest.approx((end - start) / 8 * 518, abs=1)
    assert page.locator(".axis span").all_inner_texts() == ["0 s", "8 s"]
    assert page.locator("#whose-intervals").inner_text() == "predicted by #0"
    page.close()


def unfold_filters(page: Any) -> None:
    page.locator("#filtering").evaluate("details => { details.open = true; }")


def test_filters_leave_groups_that_fit(opened: Opened):
    page = opened.page
    unfold_filters(page)
    assert page.locator("#count").inner_text() == "4 groups"
    page.select_option("#f-source", "source-1")
    assert page.locator("#count").inner_text() == "2 groups"
    page.fill("#f-high", "0.5")
    page.fill("#f-text", "row-1")
    assert page.locator("#count").inner_text() == "2 groups"
    page.fill("#f-low", "0.2")
    assert page.locator("#count").inner_text() == "0 groups"
    page.locator("#filters button[type=reset]").click()
    page.locator("#count", has_text="4 groups").wait_for()


def test_it_opens_on_the_group_that_changed_most_and_sorts_by_other_figures(opened: Opened):
    page = opened.page
    title = page.locator("#group h3").first
    assert title.inner_text().startswith("row-0 · step 1")  # its mean reward rose from 0 to 1
    assert [item.inner_text() for item in page.locator("#groups .id").all()] == ["row-0", "row-1", "row-1", "row-0"]
    assert page.locator("#groups img.thumb").count() == 4
    page.select_option("#sort", "worst")
    assert title.inner_text().startswith("row-0 · step 0")
    page.select_option("#sort", "spread")
    assert title.inner_text().startswith("row-1 · step 1")
    page.select_option("#sort", "steps")
    assert "step 0" in title.inner_text()


def test_one_prompt_over_time(opened: Opened):
    page = opened.page
    table = page.locator("#group table")
    assert [cell.inner_text() for cell in table.locator("tbody td:first-child").all()] == ["0", "1 (this)"]
    table.locator("button").click()
    assert page.locator("#group h3").first.inner_text().startswith("row-0 · step 0")


def test_a_link_opens_its_group(opened: Opened):
    page = opened.page
    page.locator("#groups button").nth(2).click()
    title, address = page.locator("#group h3").first.inner_text(), page.url
    assert title.startswith("row-1 · step 0") and address.endswith("#group=run/0/training/row-1")
    page.goto("about:blank")
    page.goto(address)
    assert page.locator("#group h3").first.inner_text() == title
    assert page.evaluate("document.getElementById('group').getBoundingClientRect().top") < 500
    page.goto(address.replace("row-1", "row-9"))
    assert page.locator("#lost").is_visible()


def test_two_runs_have_a_prompt_side_by_side(chromium: Any, tmp_path: Path):
    other = BOXES | {"completion": "<answer>[0, 0, 40, 40]</answer>", "reward": 0.25}
    folders = [write_run(tmp_path / "a", IOU, BOXES), write_run(tmp_path / "b", IOU, other)]
    write_report(folders, tmp_path / "report.html")
    page = chromium.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("#sort option").first.inner_text() == "most different between runs"
    assert page.locator("#group .side h4").all_inner_texts() == [
        "b step 1 · mean reward 0.25", "a step 1 · mean reward 1",
    ]  # fmt: skip
    page.locator("#group .side").nth(1).locator(".completion").nth(1).click()
    assert page.locator("#whose").inner_text() == "predicted by a #1"
    assert page.locator("#verdict table.runs tbody tr").count() == 2
    page.close()


def game(index: int, *steps: str) -> dict[str, Any]:
    """A row of a game whose steps are an action and the digest of the picture after it."""
    turns = [
        {"text": f"{ATTACK}{action}", "reward": 0.25, "advantage": -1.5, "calls": [], "results": [
            {"text": "", "images": 1, "digests": [digest], "kept": ["images/1.jpg"], "error": None, "seconds": 0.1},
        ]}
        for action, digest in steps
    ]  # fmt: skip
    return completion_row(0, 0, index, 1.0, {"turns": json.dumps(turns), "num_turns": len(turns), "completion": ATTACK})


@pytest.mark.parametrize("width", [1280, 390])
def test_turns_with_images_are_a_strip_that_marks_where_completions_part(chromium: Any, tmp_path: Path, width: int):
    folder = write_run(tmp_path / "run")
    write_rows(window_path(folder, 0), [game(0, *["lx"] * 12), game(1, "lx", "rx"), game(2, "ux")])
    write_report([folder], tmp_path / "report.html")
    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "report.html").as_uri() + "#group=run/0/training/row-0")
    strips = [page.get_by_label(f"Frames of completion {i}") for i in range(3)]
    assert [strip.locator("img").count() for strip in strips] == [13, 3, 2]  # the prompt's, and one after each turn
    assert [strip.locator(".parting").all_inner_texts()[0].splitlines()[-1] for strip in strips] == [
        "parts from #1", "parts from #0", "parts from all others",
    ]  # fmt: skip
    assert strips[1].locator("li").nth(1).get_attribute("class") == "parting"
    assert strips[2].locator("li").first.inner_text().split("\n")[1:3] == ["reward 0.25", "advantage -1.5"]
    assert strips[2].locator(".action").inner_text() == "…" + ATTACK[-59:] + "u"
    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_a_table_of_long_names_is_not_wider_than_a_phone(chromium: Any, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    figures = {"eval_rewards/Gymnasium_of_a_long_name/mean": -0.0063, "eval_rewards/solved/mean": 0.0625}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, **figures}) + "\n" + json.dumps({"step": 2, **figures}) + "\n")
    write_report([folder], tmp_path / "report.html")
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator(".moved").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


def test_a_live_page_reloads_until_a_person_or_time_stops_it(chromium: Any, tmp_path: Path):
    path = tmp_path / "report.html"
    write_report([write_run(tmp_path / "run")], path, reloads=True)
    live = path.read_text().replace('http-equiv="refresh" content="60"', 'http-equiv="refresh" content="1"')
    path.write_text(live)
    page = chromium.new_page()
    loads: list[str] = []
    page.on("load", lambda _: loads.append(page.url))
    page.goto(path.as_uri())
    page.wait_for_timeout(2600)
    assert len(loads) > 1
    page.locator("#stay").click()
    count = len(loads)
    page.wait_for_timeout(2200)
    assert len(loads) == count
    path.write_text(re.sub('data-written="[^"]*"', 'data-written="2020-01-01T00:00:00+00:00"', live))
    page.goto(path.as_uri())
    page.wait_for_timeout(2200)
    assert len(loads) == count + 1 and "may have died" in page.locator("#live").inner_text()
    page.close()


def test_a_phone_shows_a_short_page(chromium: Any, tmp_path: Path):
    rows = [{**completion_row(0, 0, i, 0.5), "images": None} for i in range(64)]
    folder = write_run(tmp_path / "run")
    write_rows(window_path(folder, 0), rows)
    write_report([folder], tmp_path / "report.html")
    page = chromium.new_page(viewport={"width": 390, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") < 5000
    page.close()


def test_the_index_links_to_reports_without_a_script(chromium: Any, tmp_path: Path):
    folder = write_run(tmp_path / "a run")
    write_report([folder], folder / "report.html")
    write_index(runs_in(tmp_path), tmp_path / "index.html")
    page = chromium.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.goto((tmp_path / "index.html").as_uri())
    page.get_by_role("link", name="a run").click()
    assert page.title() == "a run · rl-vlm" and problems == []
    page.close()
