"""The report in headless Chromium: nothing is loaded, nothing of a run is executed, and keys reach everything.

It needs the package playwright, and Chromium: `pip install playwright`, and `playwright install chromium` or a chromium
of the system.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.tools.report.build import write_report
from tests.helpers.run_directory import SETTINGS, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = pytest.mark.ci

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
    page.locator("svg[data-chart]").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".reading").first.inner_text() == "step 1: training 0.25"
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.getAttribute('class')"))
    assert {"f-step", "f-source", "f-score", "f-low", "f-high", "f-text", "prompt", "scroll"} <= reached


def test_filters_leave_groups_that_fit(opened: Opened):
    page = opened.page
    assert page.locator("#count").inner_text() == "4 groups"
    page.select_option("#f-source", "source-1")
    assert page.locator("#count").inner_text() == "2 groups"
    page.fill("#f-high", "0.5")
    page.fill("#f-text", "row-1")
    assert page.locator("#count").inner_text() == "2 groups"
    page.fill("#f-low", "0.2")
    assert page.locator("#count").inner_text() == "0 groups"
    page.locator("#filters button[type=reset]").click()
    page.wait_for_function("document.getElementById('count').textContent === '4 groups'")


def test_one_prompt_over_time(opened: Opened):
    page = opened.page
    table = page.locator("#group table")
    assert [cell.inner_text() for cell in table.locator("tbody td:first-child").all()] == ["0 (this)", "1"]
    table.locator("button").click()
    assert page.locator("#group h3").first.inner_text().endswith("step 1")
