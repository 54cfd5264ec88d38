"""Trajectories in completions files, in the terminal and in metrics."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from rewards.contract import Fault
from rl_vlm.config.schema import LogConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.completions import CompletionsLog, completion_rows, print_rows, rollout_table, window_path, write_rows
from rl_vlm.log.images import PromptImages
from rl_vlm.log.metrics import StepMetrics, add_reward_metrics
from rl_vlm.types import Context, Observation, Prompt, RewardTable, Sample, ScoredGroup, ToolCall, ToolResult, Turn
from tests.helpers.builders import make_trajectories, noise_image, png

CROP = ToolCall("crop", {"box": [1, 2, 3, 4]})
SEEN = png(noise_image(40, 30, seed=1))
OTHER = png(noise_image(40, 30, seed=2))
TURNS = (
    Turn("Let me see. <call>", "Let me see.", (CROP, CROP), (
        ToolResult([{"type": "image"}, {"type": "text", "text": "the crop"}], (SEEN,), None, 0.25),
        ToolResult([{"type": "text", "text": "no such box"}], (), "no such box"),
    )),
    Turn("<cal", "", (), (ToolResult([{"type": "text", "text": "not JSON"}], (), "not JSON"),)),
    Turn("It is 7.", "It is 7."),
)  # fmt: skip


def group(**fields: Any) -> ScoredGroup:
    """Two trajectories: of three turns, and of one. Turns of 2, 3 and 1 tokens have 4 and 2 observed ones between."""
    prompt = Prompt(Sample("row", [], [noise_image(8, 8, 0)], {}, ""), torch.arange(5), {}, {})
    seen = [Observation("o", torch.arange(n), {}, {}) for n in (4, 2)]
    made = make_trajectories(prompt, [[Context((2, seen[0], 3, seen[1], 1))], [Context((7,))]])
    first, second = made.group.completions
    first = replace(first, text="It is 7.", turns=TURNS)
    second = replace(second, turns=(Turn("8", "8"),), **fields)
    return replace(made, group=replace(made.group, completions=[first, second]))


def table_of(num: int) -> RewardTable:
    masks = torch.ones(1, num, dtype=torch.bool), torch.zeros(1, num, dtype=torch.bool)
    return RewardTable(["exact"], torch.zeros(1, num, 1), *masks)


def rows() -> list[dict[str, Any]]:
    return completion_rows(0, [group(environment_name="Game")], table_of(2))


def test_columns_of_a_trajectory() -> None:
    first, second = rows()
    assert (first["completion"], first["completion_length"], first["observed_length"]) == ("It is 7.", 6, 6)
    assert (first["num_turns"], first["environment"]) == (3, None)
    assert (second["num_turns"], second["environment"], second["observed_length"]) == (1, "Game", 0)
    call = {"name": "crop", "arguments": {"box": [1, 2, 3, 4]}}
    assert json.loads(first["turns"]) == [
        {"text": "Let me see. <call>", "calls": [call, call], "results": [
            {"text": "the crop", "images": 1, "digests": ["907f9212c25f89db"], "error": None, "seconds": 0.25},
            {"text": "no such box", "images": 0, "error": "no such box", "seconds": 0.0},
        ]},
        {"text": "<cal", "calls": [], "results": [
            {"text": "not JSON", "images": 0, "error": "not JSON", "seconds": 0.0},
        ]},
        {"text": "It is 7.", "calls": [], "results": []},
    ]  # fmt: skip


def test_turns_have_their_rewards_and_advantages() -> None:
    one = group()
    first, second = one.group.completions
    first = replace(
        first, turns=tuple(replace(turn, reward=r) for turn, r in zip(TURNS, (1.0, None, 0.5), strict=True))
    )
    advantages = [torch.tensor([0.25, -0.5, 1.0]), torch.tensor([0.0])]
    one = replace(one, group=replace(one.group, completions=[first, second]), turn_advantages=advantages)
    turns, (only,) = (json.loads(row["turns"]) for row in completion_rows(0, [one], table_of(2)))
    assert [(turn.get("reward"), turn["advantage"]) for turn in turns] == [(1.0, 0.25), (None, -0.5), (0.5, 1.0)]
    assert (only.get("reward"), only["advantage"]) == (None, 0.0)


def test_completions_of_single_turns_have_no_such_columns() -> None:
    plain = group()
    completions = [replace(completion, turns=()) for completion in plain.group.completions]
    (row, _) = completion_rows(0, [replace(plain, group=replace(plain.group, completions=completions))], table_of(2))
    assert not {"turns", "num_turns", "environment", "observed_length"} & row.keys()


def test_observed_images_are_kept_with_those_of_their_prompt(tmp_path: Path) -> None:
    log = CompletionsLog(tmp_path, Ranks(), LogConfig(log_completions=True), num_prompts=1)
    log.write(0, [group()], table_of(2))
    first, second = pyarrow.parquet.read_table(window_path(tmp_path, 0)).to_pylist()
    (kept,) = json.loads(first["turns"])[0]["results"][0]["kept"]
    assert (tmp_path / "completions" / kept).is_file() and kept not in first["images"]
    assert "kept" not in json.loads(second["turns"])[0]


def test_few_observed_images_are_kept(tmp_path: Path) -> None:
    sample = Sample("row", [], [], {}, "")
    keep = PromptImages(tmp_path / "images", num_prompts=1).of_completion(sample, 1)
    assert keep is not None
    assert [len(keep(files)) for files in ([SEEN, OTHER, SEEN], [OTHER] * 10, [SEEN] * 5, [SEEN])] == [3, 10, 3, 0]
    assert len(list((tmp_path / "images").iterdir())) == 2
    assert PromptImages(tmp_path, num_prompts=1).of_completion(sample, 2) is None
    assert PromptImages(tmp_path, num_prompts=10**12).of_completion(sample, 0) is None


def test_large_observed_images_are_kept_up_to_their_pixels(tmp_path: Path) -> None:
    keep = PromptImages(tmp_path / "images", num_prompts=1).of_completion(Sample("row", [], [], {}, ""), 0)
    # copies of 448 x 448 and of 448 x 224 pixels
    square, wide = png(noise_image(600, 600, seed=1)), png(noise_image(900, 450, seed=1))
    assert keep is not None and [len(keep(files)) for files in ([square] * 3, [wide] * 3, [wide, SEEN])] == [3, 2, 0]


TEXT = "-> Let me see. <call>\n<- <image> the crop\n<- [error] no such box\n-> <cal\n<- [error] not JSON\n-> It is 7."


def test_turns_are_printed(capsys: Any) -> None:
    print_rows(rows()[:1])
    assert capsys.readouterr().out == f"\n[g #0, reward 0.000]\n\n{TEXT}\n"


def test_trackers_get_turns_as_text(tmp_path: Path) -> None:
    path = window_path(tmp_path, 0)
    write_rows(path, rows())
    table = rollout_table(path, 1, ["exact"])
    assert table.columns[-1] == "turns" and [row[-1] for row in table.rows] == [TEXT, "-> 8"]


def metrics_of(*groups: ScoredGroup) -> dict[str, float]:
    metrics = StepMetrics()
    add_reward_metrics(metrics, groups, ["exact"])
    return metrics.reduce(list)


def test_calls_are_counted_as_trl_counts_them() -> None:
    found = metrics_of(group())
    assert found["tools/call_frequency"] == 2 / 2  # a call that cannot be read is none
    assert found["tools/failure_frequency"] == 1 / 2
    assert found["environment/turns"] == (3 + 1) / 2
    assert found["environment/observed_tokens"] == (6 + 0) / 2
    assert found["completions/mean_length"] == (6 + 7) / 2  # sampled tokens


def test_steps_that_failed_are_counted() -> None:
    fine, failed = ToolResult([], ()), ToolResult([], (), "no such action")
    turns = (Turn("a", "a", (), (fine,), 0.5), Turn("b", "b", (), (failed,), 0.0), Turn("c", "c"))
    one = group()
    completions = [replace(completion, turns=turns) for completion in one.group.completions]
    assert (
        metrics_of(replace(one, group=replace(one.group, completions=completions)))["environment/failed_steps"] == 0.5
    )
    assert "environment/failed_steps" not in metrics_of(one)


def test_calls_of_the_last_turn_are_not_run_and_not_counted() -> None:
    found = metrics_of(replace(one := group(), group=replace(one.group, completions=[
        replace(completion, turns=(Turn("<call>", "", (CROP,)),)) for completion in one.group.completions
    ])))  # fmt: skip
    assert found["tools/call_frequency"] == 0 and "tools/failure_frequency" not in found


def test_faults_have_no_length() -> None:
    found = metrics_of(group(finish_reason="fault", fault=Fault("timeout", "reset")))
    assert (found["completions/min_length"], found["completions/max_length"]) == (6, 6)
    assert found["completions/clipped_ratio"] == 0
