"""Windows of three prompts with two completions each, from a generator whose answers are written down."""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow.parquet
import pytest
import torch

from rl_vlm.config.schema import DataSource, RunConfig
from rl_vlm.data.loader import PromptLoader, PromptSource
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.data.samples import Part, Rows
from rl_vlm.data.tables import ListRows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import RewardError
from rl_vlm.log.completions import CompletionsLog
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.endpoint import MessageBuilder
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.sampling import stream_keys
from rl_vlm.rollout.scoring import replace_rows
from rl_vlm.rollout.weights import CheckpointWeights
from rl_vlm.rollout.window import Window
from rl_vlm.types import (
    Completion,
    Context,
    FaultKey,
    Group,
    Observation,
    Progress,
    RewardTable,
    RolloutRequest,
    Sampling,
    ScoredGroup,
    TrainerState,
    Turn,
)  # fmt: skip

F, T = False, True
SERVED = "vllm_server"  # of which the engine is a script here
NO_WEIGHTS = CheckpointWeights(Path(), is_adapter=False)  # which a script does not read
NOW = Progress(max_steps=10, global_step=7)


def number(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float | None]:
    """The answer's value; `-` does not apply, and what is no number fails."""
    log_extra("answer", completions)
    log_metric("answers", float(len(completions)))
    return [None if text == "-" else float(text) if text != "x" else math.nan for text in completions]


class Script:
    """A rollout engine that gives the next answers of each prompt."""

    def __init__(self, **answers: str) -> None:
        """For each prompt, the answers of its first group, second group, …, as in "0 0, 1 0"."""
        self.answers = {name: [group.split() for group in groups.split(",")] for name, groups in answers.items()}
        self.calls: list[list[str]] = []
        self.policy_version = 5
        self.counters: Counter[str] = Counter()

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        self.calls.append([request.group_id for request in requests])
        return [self.group(request) for request in requests]

    def group(self, request: RolloutRequest) -> Group:
        texts = self.answers[request.prompt.sample.sample_id].pop(0)
        completions = [Completion(torch.tensor([3]), torch.zeros(1), "stop", text) for text in texts]
        return Group(request.group_id, request.prompt, completions, self.policy_version)

    def sync(self, source: Any, version: int) -> int:
        return 0

    def sleep(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Steps(Script):
    """Gives trajectories of two turns. "1/0" has step rewards 1 and 0, and is worth their sum."""

    def group(self, request: RolloutRequest) -> Group:
        group = super().group(request)
        return replace(group, completions=[self.trajectory(one) for one in group.completions])

    def trajectory(self, one: Completion) -> Completion:
        rewards = [float(reward) for reward in one.text.split("/")]
        seen = Observation("o", torch.tensor([9, 9]), {}, {})
        turns = tuple(Turn(one.text, one.text, reward=reward) for reward in rewards)
        contexts = (Context((1, seen, 1)),)
        return replace(
            one, token_ids=torch.tensor([3, 4]), generator_logprobs=torch.zeros(2), text=f"{sum(rewards):g}",
            turns=turns, contexts=contexts,
        )  # fmt: skip


class RankOfTwo(Ranks):
    """One of two ranks, which are threads of this process; any operation waits for the other's."""

    def __init__(self, index: int, barrier: Barrier, slots: list[Any]) -> None:
        self.index, self.barrier, self.slots = index, barrier, slots

    @property
    def rank(self) -> int:
        return self.index

    @property
    def world_size(self) -> int:
        return 2

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def gather(self, values: list[Any]) -> list[Any]:
        self.slots[self.index] = values
        self.barrier.wait(timeout=30)
        both = [*self.slots[0], *self.slots[1]]
        self.barrier.wait(timeout=30)
        return both

    def sum(self, values: Sequence[float]) -> list[float]:
        return [first + second for first, second in zip(*self.gather([values]), strict=True)]


def on_two_ranks(*scripts: Script, **settings: Any) -> list[Window | BaseException | None]:
    """The window that each rank makes from its script, or the error that it raises instead."""
    barrier, slots = Barrier(2), [None, None]
    collectors = [
        make_collector(script, 0, ranks=RankOfTwo(i, barrier, slots), **settings) for i, script in enumerate(scripts)
    ]
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(collector.current, Progress(max_steps=1), StepMetrics()) for collector in collectors]
    assert all(c.window is not None or c.loader.state_dict()["cursor"] == 0 for c in collectors)
    return [future.exception() or future.result() for future in made]


def has_work(group: ScoredGroup) -> int:
    return int(group.has_variance)


def make_collector(
    script: Script,
    rounds: int,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    max_fault_fraction: float = 1.0,
    on_error: str = "mask",
    tools: Sequence[str] = (),
    **algorithm: Any,
) -> Collector:
    """Of three rows a, b and c; completions are written to `folder`, if one is given."""
    ranks = ranks or Ranks()
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "none"},
            "rollout": {
                "num_generations": 2,
                "max_resampling_rounds": rounds,
                "max_staleness": 1,
                "engine": SERVED,
                "tools": list(tools),
            },
            "train": {"prompts_per_step": 3 * ranks.world_size},
            "rewards": {
                "reward_funcs": [{"function": f"{__name__}:number", "on_error": on_error}],
                "max_fault_fraction": max_fault_fraction,
            },
            "algorithm": algorithm,
            "log": {"log_completions": folder is not None},
        }
    )
    table = ListRows([{"prompt": "?"}] * 3)
    rows = Rows("rows", table, ["a", "b", "c"], [Part(DataSource(name="rows"), table, Path())], config.data)
    sampler = PromptSampler(3, 3, seed=0, shuffle=False)
    loader = PromptLoader(PromptSource(rows, [0, 1, 2], MessageBuilder()), sampler, 1, config.data)
    engine, log = SyncedEngine(script, NO_WEIGHTS, ranks), CompletionsLog(folder or Path(), ranks, config.log)
    return Collector(config, ranks, loader, engine, RewardSuite(config.rewards), log, cost=has_work)


def collect(script: Script, **settings: Any) -> tuple[list[list[str]], dict[str, float], Collector]:
    """Answers of the window's groups, metrics without times, and the collector."""
    collector, metrics = make_collector(script, **settings), StepMetrics()
    window = collector.collect(NOW, metrics)
    found = {name: value for name, value in metrics.reduce(list).items() if not name.startswith("time/")}
    return [[c.text for c in scored.group.completions] for scored in window.groups], found, collector


def resampling(metrics: dict[str, float]) -> tuple[float, ...]:
    return tuple(metrics[f"resampling/{name}"] for name in ("rounds", "completions", "groups_recovered"))


def test_groups_without_variance_are_sampled_again_until_they_have_some():
    script = Script(a="1 1, 1 0", b="0 1", c="0 0, 1 1, 0 1")
    answers, metrics, _ = collect(script, rounds=3)
    assert answers == [["1", "0"], ["0", "1"], ["0", "1"]]
    assert script.calls == [
        ["7/0/a", "7/0/b", "7/0/c"],
        ["7/0/a/resample-1", "7/0/c/resample-1"],
        ["7/0/c/resample-2"],
    ]
    assert resampling(metrics) == (2, 2 * 2 + 1 * 2, 2)


def test_the_first_group_stays_where_no_round_finds_variance():
    script = Script(a="0 0, 1 1, 2 2, 0 1", b="0 1", c="0 1")
    answers, metrics, _ = collect(script, rounds=2)
    assert answers[0] == ["0", "0"]
    assert len(script.calls) == 1 + 2
    assert resampling(metrics) == (2, 4, 0)


def test_nothing_is_sampled_again_by_default():
    script = Script(a="0 0", b="0 0", c="0 0")
    answers, metrics, _ = collect(script, rounds=0)
    assert (answers, len(script.calls)) == ([["0", "0"]] * 3, 1)
    assert not any(name.startswith("resampling/") for name in metrics)


def test_a_window_with_variance_everywhere_costs_nothing():
    script = Script(a="0 1", b="0 1", c="0 1")
    assert resampling(collect(script, rounds=2)[1]) == (0, 0, 0)
    assert len(script.calls) == 1


def test_only_valid_rewards_count_as_variance():
    answers, metrics, _ = collect(Script(a="0 x, 1 x", b="0 -, 0 1", c="x x, 1 0"), rounds=1)
    assert answers == [["0", "x"], ["0", "1"], ["1", "0"]]
    assert resampling(metrics) == (1, 6, 2)


def test_each_round_has_random_streams_of_its_own():
    script = Script(a="0 0, 1 1, 0 1", b="0 1", c="0 1")
    collect(script, rounds=2)
    ids = [call[0] for call in script.calls]
    keys = [key for group_id in ids for key in stream_keys(42, group_id, 2).tolist()]
    assert len(set(keys)) == 3 * 2


def test_the_log_has_the_groups_that_are_trained_on_and_the_metrics_all_calls(tmp_path: Path):
    _, metrics, _ = collect(Script(a="0 0, x 3", b="0 1", c="2 x, x x"), rounds=1, folder=tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00007.parquet").to_pylist()
    rows = [(row["group_id"], row["answer"], row["number"]) for row in table]
    assert rows == [
        ("7/0/a", "0", 0.0), ("7/0/a", "0", 0.0),
        ("7/0/b", "0", 0.0), ("7/0/b", "1", 1.0),
        ("7/0/c", "2", 2.0), ("7/0/c", "x", None),
    ]  # fmt: skip
    assert metrics["answers"] == (6 + 4) / 2
    assert [value for name, value in metrics.items() if name.startswith("reward_faults/number/")] == [4]


def test_advantages_span_the_window_that_is_trained_on():
    script = Script(a="0 0, 0 8", b="0 0, 4 4", c="0 0, 4 4")
    collector = make_collector(script, rounds=1, scale_rewards="batch")
    window = collector.collect(Progress(max_steps=1), StepMetrics())
    std = torch.tensor([0.0, 8, 0, 0, 0, 0]).std().item()
    assert [scored.has_variance for scored in window.groups] == [T, F, F]
    assert window.groups[0].advantages_G.tolist() == pytest.approx([-4 / (std + 1e-4), 4 / (std + 1e-4)])


def test_the_standard_deviation_of_a_batch_spans_the_ranks():
    """Six rewards are 6 and six are 0, with mean 3; the first rank alone has one 6."""
    scripts = Script(a="0 6", b="0 0", c="0 0"), Script(a="6 6", b="6 6", c="6 0")
    first, second = on_two_ranks(*scripts, scale_rewards="batch")
    assert isinstance(first, Window) and isinstance(second, Window)
    scaled = 3 / (math.sqrt(12 * 3**2 / 11) + 1e-4)
    assert first.groups[0].advantages_G.tolist() == pytest.approx([-scaled, scaled])
    assert second.groups[2].advantages_G.tolist() == pytest.approx([scaled, -scaled])


TURNS: dict[str, Any] = {"tools": ["game.py:play"], "scale_rewards": "none"}


def test_groups_whose_turns_alone_differ_are_not_sampled_again():
    """Of each group the rewards are equal. The returns of the second turns differ in groups a and c."""
    script = Steps(a="1/0 0/1", b="1/1 1/1, 2/0 1/1", c="0/0 0/0, 0/1 1/0")
    answers, metrics, _ = collect(script, rounds=2, turn_advantages="gigpo", **TURNS)
    assert answers == [["1", "1"], ["2", "2"], ["1", "1"]]
    assert resampling(metrics) == (1, 4, 2)
    window = make_collector(Steps(a="1/0 0/1", b="1/1 1/1", c="0/0 1/1"), 0, turn_advantages="return", **TURNS)
    groups = window.collect(NOW, StepMetrics()).groups
    assert [group.has_variance for group in groups] == [T, T, T]
    assert [[values.tolist() for values in group.turn_advantages] for group in groups] == [
        [[0.25, -0.75], [0.25, 0.25]],  # 1 0, 1 1
        [[0.5, -0.5], [0.5, -0.5]],  # 2 1, 2 1
        [[-0.75, -0.75], [1.25, 0.25]],  # 0 0, 2 1
    ]
    assert [group.advantages_G.tolist() for group in groups] == [[-0.25, 0.25], [0.0, 0.0], [-0.75, 0.75]]


def test_returns_of_all_ranks_have_one_standard_deviation():
    """Returns are 4 0 and 4 4 in one group, and 2 in the twenty turns of the five others."""
    scripts = Steps(a="4/0 0/4", b="0/2 0/2", c="0/2 0/2"), Steps(a="0/2 0/2", b="0/2 0/2", c="0/2 0/2")
    settings = TURNS | {"scale_rewards": "batch", "turn_advantages": "return"}
    first, second = on_two_ranks(*scripts, **settings)
    assert isinstance(first, Window) and isinstance(second, Window)
    std = torch.tensor([4.0, 0, 4, 4] + [2.0] * 20).std().item() + 1e-4
    found = [values.tolist() for values in first.groups[0].turn_advantages]
    assert found == [pytest.approx([1 / std, -3 / std]), pytest.approx([1 / std, 1 / std])]
    assert not any(group.has_variance for group in [*first.groups[1:], *second.groups])


NAN = "number/nan: returned nan; masked completions of samples: "
MEND = "Fix the function or the data, and resume with train.resume_from_checkpoint=auto."


def test_a_window_without_a_reward_is_an_error_that_names_the_fault_and_leaves_the_rows_undrawn(tmp_path):
    collector = make_collector(Script(a="x x, 0 1", b="x -, 0 1", c="x x, 0 1"), 0, tmp_path)
    with pytest.raises(RewardError) as stop:
        collector.current(Progress(max_steps=1), StepMetrics())
    assert str(stop.value).splitlines() == [
        "none of the 6 completions of a generation window has a reward:",
        f"{NAN}a [0, 1], b [0], c [0, 1]",
        "all/not_applicable: no reward function applies; masked completions of samples: b [1]",
        MEND,
    ]
    assert (tmp_path / "completions" / "completions_00000.parquet").exists()
    window = collector.current(Progress(max_steps=1), StepMetrics())
    assert [[c.text for c in scored.group.completions] for scored in window.groups] == [["0", "1"]] * 3


def test_one_reward_is_enough():
    window = make_collector(Script(a="x x", b="x 0", c="x x"), 0).current(Progress(max_steps=1), StepMetrics())
    assert [scored.valid_G.tolist() for scored in window.groups] == [[F, F], [F, T], [F, F]]


def test_a_window_is_that_of_all_ranks():
    faulty, fine = Script(a="x x", b="x x", c="x x"), Script(a="0 x", b="x x", c="x x")
    assert all(isinstance(window, Window) for window in on_two_ranks(faulty, fine))
    errors = on_two_ranks(*(Script(a="x x", b="x x", c=c) for c in ("x x", "x -")))
    for error in errors:
        assert isinstance(error, RewardError)
        assert str(error).startswith("none of the 12 completions ")


def test_groups_with_variance_are_dealt_to_all_ranks():
    scripts = Script(a="0 1", b="0 2", c="0 3"), Script(a="1 1", b="2 2", c="3 3")
    windows = on_two_ranks(*scripts)
    texts = [[[c.text for c in g.group.completions] for g in w.step_groups()] for w in windows if isinstance(w, Window)]
    assert texts == [[["0", "1"], ["0", "2"]], [["0", "3"], ["1", "1"], ["2", "2"], ["3", "3"]]]


@pytest.mark.parametrize(("limit", "stops"), [(0.0, True), (0.3, True), (0.34, False), (1.0, False)])
def test_the_fraction_of_faults_that_is_tolerated(limit, stops):
    """Two of six completions fail; one more does not apply, which is no fault."""
    collector = make_collector(Script(a="x 0", b="0 1", c="- x"), 0, max_fault_fraction=limit)
    if not stops:
        collector.current(Progress(max_steps=1), StepMetrics())
        return
    with pytest.raises(RewardError) as stop:
        collector.current(Progress(max_steps=1), StepMetrics())
    assert str(stop.value).startswith(
        "reward functions fail on 2 of the 6 completions of a generation window, more than "
        f"rewards.max_fault_fraction {limit:g} allows:\n{NAN}a [0], c [1]\n"
    )


def test_one_fault_of_a_function_that_must_not_fail_ends_the_run():
    collector = make_collector(Script(a="0 1", b="0 1", c="0 x"), 0, on_error="raise")
    with pytest.raises(RewardError) as stop:
        collector.current(Progress(max_steps=1), StepMetrics())
    assert str(stop.value).startswith(
        "a reward function with on_error: raise fails on 1 completions of a generation window:\n" + NAN
    )
    make_collector(Script(a="0 1", b="0 1", c="0 -"), 0, on_error="raise").current(Progress(1), StepMetrics())


def test_completions_without_a_fault_need_no_tolerance():
    collector = make_collector(Script(a="- 0", b="0 1", c="- -"), 0, max_fault_fraction=0.0)
    window = collector.current(Progress(max_steps=1), StepMetrics())
    assert [scored.valid_G.tolist() for scored in window.groups] == [[F, T], [T, T], [F, F]]


def test_time_of_all_rounds_adds_up(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("rl_vlm.log.metrics.time.perf_counter", lambda: float(next(clock)))
    metrics = StepMetrics()
    make_collector(Script(a="0 0, 0 1", b="0 1", c="0 1"), rounds=1).collect(Progress(max_steps=1), metrics)
    assert metrics.seconds == {"data": 1, "generation": 2, "rewards": 2}


def test_an_error_in_a_later_round_leaves_the_sampler_where_it_was(monkeypatch):
    collector = make_collector(Script(a="0 0, 0 1", b="0 1", c="0 1"), rounds=1)
    score, calls = collector.rewards.score, []

    def fails_at_second(groups: Any, state: TrainerState) -> RewardTable:
        calls.append(groups)
        if len(calls) == 2:
            raise RewardError("gone")
        return score(groups, state)

    monkeypatch.setattr(collector.rewards, "score", fails_at_second)
    with pytest.raises(RewardError, match="gone"):
        collector.current(Progress(max_steps=1), StepMetrics())
    assert collector.loader.state_dict()["cursor"] == 0


NAN_OF_F, LATE_F = FaultKey("f", "nan"), FaultKey("f", "timeout")


def table(scores: list[list[float]], **contents: Any) -> RewardTable:
    scores_PG = torch.tensor(scores)
    return RewardTable(["f"], scores_PG[:, :, None], ~scores_PG.isnan(), scores_PG.isnan(), **contents)


def test_rows_are_replaced_with_all_of_their_columns():
    old = table(
        [[0.0, 0.0], [1.0, 2.0]], breakdown={"both": [["a", "b"], ["c", "d"]], "old": [[1, 2], [3, 4]]},
        metrics={"m": [1.0]}, fault_counts={NAN_OF_F: 2}, fault_messages={NAN_OF_F: "first"},
        faults={(0, 0): ["f/nan: old"], (1, 1): ["f/nan: kept"]},
    )  # fmt: skip
    new = table(
        [[9.0, 9.0], [5.0, math.nan]], breakdown={"both": [["w", "x"], ["y", "z"]], "new": [[6, 7], [8, 9]]},
        metrics={"m": [2.0], "n": [3.0]}, fault_counts={NAN_OF_F: 2, LATE_F: 1},
        fault_messages={NAN_OF_F: "second", LATE_F: "late"},
        faults={(0, 0): ["f/nan: unused"], (1, 1): ["f/timeout: new"]},
    )  # fmt: skip
    replace_rows(old, new, {0: 1})
    assert old.scores_PGF[:, :, 0].nan_to_num(-1.0).tolist() == [[5, -1], [1, 2]]
    assert old.valid_PG.tolist() == [[T, F], [T, T]]
    assert old.faulted_PG.tolist() == [[F, T], [F, F]]
    assert old.breakdown == {
        "both": [["y", "z"], ["c", "d"]], "old": [[None, None], [3, 4]], "new": [[8, 9], [None, None]]
    }  # fmt: skip
    assert old.metrics == {"m": [1.0, 2.0], "n": [3.0]}
    assert old.faults == {(0, 1): ["f/timeout: new"], (1, 1): ["f/nan: kept"]}
    assert old.fault_counts == {NAN_OF_F: 4, LATE_F: 1}
    assert old.fault_messages == {NAN_OF_F: "first", LATE_F: "late"}
