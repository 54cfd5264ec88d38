import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.log.progress_bar import ProgressBar, bar_class, training_figures

LINE = {
    "step": 3, "reward": 0.256, "rewards/exact/mean": 0.125, "rewards/exact/std": 0.3, "eval_rewards/exact/mean": 0.5,
}  # fmt: skip


def output(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, **settings: Any) -> str:
    """What the third of five steps puts on standard error, 7 seconds after the run went on from the second."""
    stderr, times = io.StringIO(), iter([100.0, 107.0])
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("rl_vlm.log.progress_bar.monotonic", lambda: next(times))
    with ProgressBar(2, 5, "step", **settings) as bar:
        bar.show(3, training_figures(LINE))
    return stderr.getvalue()


@pytest.mark.parametrize(("is_terminal", "plain"), [(True, True), (False, True), (False, False)])
def test_one_plain_line_per_step_on_request_and_off_a_terminal(monkeypatch, is_terminal: bool, plain: bool):
    expected = "step 3/5, reward 0.26, exact 0.12, held-out exact 0.50, 14 s left\n"
    assert output(monkeypatch, is_terminal, plain=plain) == expected


def test_a_terminal_gets_a_bar(monkeypatch):
    bar = output(monkeypatch, is_terminal=True)
    assert re.search(r"\r.* 3/5 .*held-out exact=0\.50", bar)
    assert "step 3/5" not in bar


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_silent_prints_nothing(monkeypatch, is_terminal: bool, plain: bool):
    assert output(monkeypatch, is_terminal, plain=plain, silent=True) == ""


def test_the_total_reward_is_shown_beside_a_function_of_that_name():
    line = {"reward": 1.5, "rewards/reward/mean": 0.5, "rewards/exact/mean": 1.0, "eval_rewards/reward/mean": 0.25}
    assert training_figures(line) == {
        "reward": "1.50", "rewards/reward": "0.50", "exact": "1.00", "held-out reward": "0.25",
    }  # fmt: skip


@pytest.mark.parametrize(("columns", "is_bar"), [(80, True), (0, False)])
def test_a_terminal_of_no_columns_gets_lines(monkeypatch, columns: int, is_bar: bool):
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(side, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with ProgressBar(0, 2, "step") as bar:
            bar.show(1, {"reward": "0.50"})
        terminal.flush()
        printed = ""
        while "1/2" not in printed:
            printed += os.read(main, 4096).decode()
    os.close(main)
    assert printed.startswith("step 1/2, reward 0.50, ") is not is_bar
    assert ("1/2 [" in printed) is is_bar


@pytest.mark.parametrize(("application", "is_bar"), [("IPKernelApp", True), ("TerminalIPythonApp", False)])
def test_a_notebook_gets_a_bar_without_a_terminal(monkeypatch, application: str, is_bar: bool):
    shell = SimpleNamespace(config={application: {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr("rl_vlm.log.progress_bar.find_spec", lambda name: None)
    assert ("step 3/5, " not in output(monkeypatch, is_terminal=False)) is is_bar


@pytest.mark.parametrize("widgets", [None, "found"])
def test_a_notebook_with_widgets_gets_a_bar_of_its_own(monkeypatch, widgets: str | None):
    monkeypatch.setattr("rl_vlm.log.progress_bar.in_notebook", lambda: True)
    monkeypatch.setattr("rl_vlm.log.progress_bar.find_spec", lambda name: widgets)
    assert bar_class().__name__ == ("tqdm_notebook" if widgets else "tqdm")


def test_the_title_stands_before_the_figures(monkeypatch):
    assert output(monkeypatch, is_terminal=False, title="evaluation").startswith("evaluation: step 3/5, ")
    assert "evaluation: " in output(monkeypatch, is_terminal=True, title="evaluation")


def test_a_bar_within_another_disappears(monkeypatch):
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stderr)
    with ProgressBar(0, 2, "step") as outer:
        with ProgressBar(0, 1, "prompt", title="evaluation") as inner:
            inner.show(1, {})
        outer.show(2, {})
    (line,) = screen(stderr.getvalue())
    assert "2/2" in line


def screen(text: str) -> list[str]:
    """What a terminal shows after it has printed the text: the lines that are not empty."""
    lines, row = [""], 0
    for part in re.findall(r"\r|\n|\x1b\[A|[^\r\n\x1b]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif part != "\r":  # every text begins behind one
            lines[row] = part + lines[row][len(part) :]
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("more", "figures"),
    [
        ({"skipped_updates/no_variance": 0.0, "skipped_updates/nonfinite": 0.0}, {}),
        ({"reward_faults/judge/nan": 1.0, "reward_faults/judge/timeout": 12.0}, {"reward faults": "13"}),
        ({"skipped_updates/no_variance": 1.0, "skipped_updates/nonfinite": 0.0}, {"update skipped": "no variance"}),
        ({"skipped_updates/no_variance": 0.0, "skipped_updates/nonfinite": 1.0}, {"update skipped": "nonfinite"}),
    ],
)
def test_faults_and_skipped_updates_are_figures(more, figures):
    assert training_figures({"reward": 0.5} | more) == {"reward": "0.50"} | figures
