import io
import re

import pytest

from rl_vlm.log.progress_bar import ProgressBar, training_figures

LINE = {
    "step": 3, "reward": 0.256, "rewards/exact/mean": 0.125, "rewards/exact/std": 0.3, "eval_rewards/exact/mean": 0.5,
}  # fmt: skip


def output(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, **settings: bool) -> str:
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
