"""What the README shows works as it is written, and its figures are those of the pages that it links to."""

import json
import re
from pathlib import Path

import pytest

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.config.schema import RewardsConfig
from rl_vlm.log.messages import held_out_line
from rl_vlm.model.families import FAMILIES
from rl_vlm.passes.proof import OWN_FORWARD, SHARED, Comparison, ProofCheck
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import TrainerState
from tests.helpers.builders import answered_group
from tests.helpers.pages import README, ROOT, block

TEXT = README.read_text()
MESSAGES = [{"role": "user", "content": "Which digit is this?"}]
BENCHMARKS = ROOT / "docs" / "benchmarks"
LOG = " ".join((ROOT / "docs/LOG.md").read_text().split())


def test_it_is_a_page_of_120_lines():
    assert len(TEXT.splitlines()) <= 120


@pytest.mark.parametrize("prompt", ["Which digit is this?", MESSAGES], ids=["text", "messages"])
def test_the_custom_reward(prompt: str | list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = block(TEXT, "python", "# my_reward.py")
    assert len(source.splitlines()) <= 10
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    override = re.search(r"rewards\.reward_funcs='([^']+)'", TEXT)
    assert override
    config = load_config(ROOT / "configs/digits.yaml", [f"rewards.reward_funcs={override[1]}"])

    texts = ["<answer>7</answer>", "It is a <answer>1</answer>.", "x" * 40]
    with RewardSuite(RewardsConfig(reward_funcs=config.rewards.reward_funcs)) as suite:
        table = suite.score([answered_group(prompt, texts)], TrainerState(0, 1, 0.0))
    assert table.fault_messages == {}
    assert table.names == ["exact_match", "short_answer"]
    assert table.scores_PGF.tolist() == [[[1.0, 1.0], [0.0, 0.5], [0.0, 0.0]]]
    assert table.metrics == {"characters": [pytest.approx((18 + 27 + 40) / 3)]}


def test_the_run_of_your_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_first_run.yaml").write_text(block(TEXT, "yaml", "# my_first_run.yaml"))
    monkeypatch.chdir(tmp_path)
    config = load_config("my_first_run.yaml")
    check_trainable(config)
    assert batch_sizes(config, world_size=1).completions_per_step == 128
    with RewardSuite(config.rewards) as suite:
        suite.check_columns({"image", "question", "solution"})


def figures(measurement: str) -> list[float]:
    """Return the numbers in the result of a row of the README's table of measurements."""
    result = re.search(rf"^\| \[{measurement}\].*\| (.*) \|$", TEXT, re.MULTILINE)
    assert result
    return [float(number) for number in re.findall(r"\b\d+\.?\d*(?:e-\d+)?\b", result[1])]


def test_the_figures_against_trl_are_those_of_the_benchmarks():
    by_eight, by_sixteen = (json.loads((BENCHMARKS / f"{name}.json").read_text()) for name in ("1-trl-8", "2-trl-16"))
    speed_ups = [run["speedup_vs_peer"] for run in (by_eight, by_sixteen)]
    memory = [run["peak_memory_vs_peer"] for run in (by_eight, by_sixteen)]
    assert figures("training pass") == [round(speed_ups[0], 1), 8, round(speed_ups[1], 1), 16]
    assert figures("memory") == [round(memory[0], 2), 8, round(memory[1], 2), 16]


def test_the_figures_of_exactness_are_those_of_the_table_of_families():
    listed, measured = (ROOT / "docs/families.md").read_text().split("<!-- table: begin -->")
    rows = re.findall(r"^\| (\w+) \| (\S+) / \S+ \| (\S+) / ", measured, re.MULTILINE)
    families = re.findall(r"^\| [^|]+ \| (`[^|]+) \| shared row", listed, re.MULTILINE)
    counts = re.search(r"\[exactness\]\S+ in (\d+) tiny models of (\d+) families", TEXT)
    assert counts and int(counts[1]) == len(rows)
    assert int(counts[2]) == sum(line.count(",") + 1 for line in families)
    assert figures("exactness") == [max(float(row[1]) for row in rows), max(float(row[2]) for row in rows)]


def test_the_lines_of_a_run_are_those_that_it_logs():
    """The scores are of a run that docs/LOG.md describes."""
    lines = block(TEXT, "text", "held out").splitlines()
    assert lines[0] == held_out_line(0, held_out(0.302, 1.0, 0.102))
    assert lines[3] == held_out_line(100, held_out(1.149, 1.0, 0.949))
    for line, of, difference in ((lines[1], OWN_FORWARD, 2.1e-7), (lines[2], SHARED, 3.7e-7)):
        check = ProofCheck(of, (Comparison("log-probs", difference, 1e-5), Comparison("the worst log-prob", 0.0, 5e-5)))
        assert str(check).startswith(line.removesuffix("…"))
    assert "0.102 held out before" in LOG and "0.949 after 100" in LOG


def held_out(reward: float, format_tags: float, exact_match: float) -> dict[str, float]:
    names = {"rewards/format_tags/mean": format_tags, "rewards/exact_match/mean": exact_match}
    return {"reward": reward, **names}


def test_the_number_of_families_is_that_of_the_table():
    count = re.search(r"\[(\d+) model families\]", TEXT)
    assert count and int(count[1]) == len(FAMILIES)
