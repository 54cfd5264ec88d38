"""Metrics of an optimizer step over micro-batches and ranks, with the times of stages, and their log on disk."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_vlm.algorithm.advantages import reward_std
from rl_vlm.algorithm.losses import LossMetrics, MetricSum
from rl_vlm.log.files import atomic_write
from rl_vlm.log.trajectories import is_trajectory, num_observed
from rl_vlm.stages import AHEAD, NO_ONE, PARTS_OF_TRAINING, Listener, Stage, Stages
from rl_vlm.types import Completion, ScoredGroup

logger = logging.getLogger(__name__)

Gather = Callable[[list[Any]], list[Any]]

WITHOUT_VARIANCE = "frac_reward_zero_std"
"""Share of groups whose advantages are all 0, as with equal rewards."""
BEST_OF_GROUP = "reward_best_of_group"
"""Mean over groups of the best reward of a completion."""
DISTINCT_ANSWERS = "completions/distinct_answers"
"""Mean number of distinct answers of a group."""
NUM_GROUPS = "completions/num_groups"
"""Groups of a step."""
FAULTED = "frac_reward_faults"
"""Share of a window's completions on which a reward function failed. Only the window's first step has it."""
CALL_FREQUENCY = "tools/call_frequency"
"""Calls per completion."""
FAILURE_FREQUENCY = "tools/failure_frequency"
"""Failed calls per call."""
TURNS = "environment/turns"
"""Turns per completion."""
ENGINE_WAIT = "environment/engine_wait_fraction"
"""Share of the time of generation in which the engine has no turn to sample, since all wait for environments."""
ITERATION = "sampling/iteration"
"""How often earlier steps have trained on the groups of a step. Later iterations repeat the metrics of the groups."""

STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "std": reward_std,
    "min": torch.amin,
    "max": torch.amax,
}


class Timer(Listener):
    """Adds up the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage.value] += time.perf_counter() - start


class StepMetrics:
    """Means in two parts (total, count), plain sums, values per completion, and seconds per stage, of one rank."""

    def __init__(self, stages: Stages = NO_ONE) -> None:
        """`stages` announces the stages, which are timed here."""
        self.timer = Timer()
        self.seconds = self.timer.seconds
        self.stages = stages.with_listener(self.timer)
        self.means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.sums: dict[str, float] = defaultdict(float)
        self.values: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add_mean(self, name: str, total: int | float, count: int | float) -> None:
        self.means[name][0] += total
        self.means[name][1] += count

    def add_values(self, values: torch.Tensor, **names: str) -> None:
        """Add values, such as one per completion, to the metrics named by statistic; NaN is ignored.

        `add_values(lengths, mean="mean_length", max="max_length")`: any of `STATISTICS`, over all ranks.
        """
        for statistic, name in names.items():
            self.values[statistic, name] += values[~values.isnan()].tolist()

    def add_loss_metrics(self, batches: Sequence[LossMetrics]) -> None:
        """Add the loss metrics of micro-batches. Copy all of them from their device at once."""
        parts = [(name, part) for metrics in batches for name, part in metrics.items()]
        values = iter(read_together([x for _, part in parts for x in part if isinstance(x, torch.Tensor)]))
        for name, part in parts:
            if isinstance(part, MetricSum):
                self.add_mean(name, next(values), next(values))
            elif not math.isnan(extreme := next(values)):
                self.values[part.statistic, name].append(extreme)

    def add_sum(self, name: str, value: int | float) -> None:
        self.sums[name] += value

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Announce a stage."""
        return self.stages.run(stage)

    def include(self, other: StepMetrics, prefix: str = "") -> None:
        """Add the metrics of `other`. Put the prefix before the names of its stages."""
        for name, (total, count) in other.means.items():
            self.add_mean(name, total, count)
        for name, value in other.sums.items():
            self.sums[name] += value
        for key, values in other.values.items():
            self.values[key] += values
        for name, value in other.seconds.items():
            self.seconds[f"{prefix}{name}"] += value

    def state_dict(self) -> dict[str, Any]:
        """Return all metrics added so far."""
        return {name: dict(getattr(self, name)) for name in ("means", "sums", "values", "seconds")}

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[Any, Any]]) -> StepMetrics:
        metrics = cls()
        for name, parts in state.items():
            getattr(metrics, name).update(parts)
        return metrics

    def reduce(self, gather: Gather) -> dict[str, float]:
        """Compute the metrics over all ranks. Times are the slowest rank's. Statistics without values are left out."""
        ranks = gather([self.state_dict()])
        total = StepMetrics()
        for state in ranks:
            total.include(StepMetrics.from_state(state))
        return (
            {name: value / count for name, (value, count) in total.means.items() if count}
            | dict(total.sums)
            | {
                name: STATISTICS[statistic](torch.tensor(values, dtype=torch.float64)).item()
                for (statistic, name), values in total.values.items()
                if values
            }
            | {seconds_of(name): max(state["seconds"].get(name, 0.0) for state in ranks) for name in total.seconds}
        )


def seconds_of(stage: str) -> str:
    """Return the metric that holds a stage's seconds."""
    return f"time/{stage}"


NO_STAGE = tuple(map(seconds_of, (Stage.STEP, *PARTS_OF_TRAINING, Stage.SAVE, AHEAD)))
"""Metrics that do not add up to the seconds of a step: the step itself, parts of training, saving, sampling ahead."""


def stage_seconds(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the stages that a step consists of, by stage."""
    return {
        name.removeprefix(seconds_of("")): value
        for name, value in line.items()
        if name.startswith(seconds_of("")) and not name.startswith(NO_STAGE)
    }


def read_together(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Copy scalars from a device at once, and return their values. float64 holds counts and losses exactly."""
    return torch.stack([scalar.double() for scalar in scalars]).cpu().tolist() if scalars else []


def add_reward_metrics(metrics: StepMetrics, groups: Sequence[ScoredGroup], names: Sequence[str]) -> None:
    """Add rewards, their spread and the completions' lengths, under TRL's names.

    As in TRL, `reward_std` is the standard deviation over all rewards of the step, not within groups. There are two
    differences. `step_tokens` counts one step, while TRL's `num_tokens` adds up over the run. If no completion
    terminated, the terminated lengths are left out, while TRL logs 0. TRL has neither the mean of the groups' best
    rewards nor that of their distinct answers. Lengths leave out faults of environments.
    """
    if not groups:
        return
    metrics.add_values(torch.cat([scored.rewards_G for scored in groups]), mean="reward", std="reward_std")
    best_P = pad_sequence([scored.rewards_G for scored in groups], batch_first=True, padding_value=math.nan)
    best_P = best_P.nan_to_num(nan=-math.inf).amax(dim=1)
    metrics.add_values(best_P.where(best_P.isfinite(), math.nan), mean=BEST_OF_GROUP)
    metrics.add_sum(NUM_GROUPS, len(groups))
    metrics.add_mean(WITHOUT_VARIANCE, sum(not scored.has_variance for scored in groups), len(groups))
    counts = [scored.num_answers for scored in groups if scored.num_answers is not None]
    metrics.add_mean(DISTINCT_ANSWERS, sum(counts), len(counts))
    scores_NF = torch.cat([scored.scores_GF for scored in groups])
    for scores, name in zip(scores_NF.unbind(dim=1), names, strict=True):
        metrics.add_values(scores, mean=f"rewards/{name}/mean", std=f"rewards/{name}/std")
    completions = [completion for scored in groups for completion in scored.group.completions]
    lengths = torch.tensor([float(len(c.token_ids)) for c in completions])  # sampled ones, as TRL counts them
    clipped = torch.tensor([c.finish_reason == "length" for c in completions])
    whole = (lengths > 0) & torch.tensor([c.finish_reason != "fault" for c in completions])
    for kind, some in (("length", lengths[whole]), ("terminated_length", lengths[whole & ~clipped])):
        metrics.add_values(some, **{s: f"completions/{s}_{kind}" for s in ("mean", "min", "max")})
    metrics.add_values(clipped.float(), mean="completions/clipped_ratio")
    prompts = [scored.group.prompt_of(some[0]) for scored in groups for some in scored.group.by_prompt()]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    metrics.add_sum("step_tokens", lengths.double().sum().item() + num_prompt_tokens)
    add_trajectory_metrics(metrics, [completion for completion in completions if is_trajectory(completion)])


def add_trajectory_metrics(metrics: StepMetrics, trajectories: Sequence[Completion]) -> None:
    """Add the frequency of calls and of failed calls as TRL defines them, and means of turns and observed tokens.

    A call counts if it was run. An unreadable call does not count. If there are no calls, the frequency of failures is
    left out, while TRL logs 0. Also add the share of steps that failed, such as steps with an unknown action.
    """
    turns = [turn for completion in trajectories for turn in completion.turns if turn.calls and turn.results]
    num_calls = sum(len(turn.calls) for turn in turns)
    num_failed = sum(result.error is not None for turn in turns for result in turn.results)
    num = len(trajectories)
    steps = [turn for completion in trajectories for turn in completion.turns if turn.reward is not None]
    failed_steps = sum(result.error is not None for turn in steps for result in turn.results)
    metrics.add_mean("environment/failed_steps", failed_steps, len(steps))
    metrics.add_mean(CALL_FREQUENCY, num_calls, num)
    metrics.add_mean(FAILURE_FREQUENCY, num_failed, num_calls)
    metrics.add_mean(TURNS, sum(len(completion.turns) for completion in trajectories), num)
    metrics.add_mean("environment/observed_tokens", sum(map(num_observed, trajectories)), num)


def is_number(value: Any) -> bool:
    """Return whether a logged value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def is_score(metric: str) -> bool:
    """Return whether a metric is the mean score of a reward function, in training or on held-out rows."""
    return metric.startswith(("rewards/", "eval_rewards/")) and metric.endswith("/mean")


def function_name(score: str) -> str:
    """Return the function of a score: `exact_match` for `eval_rewards/exact_match/mean`."""
    return score.split("/")[1]


def reward_faults(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of completions that each function failed on, by `function/kind`."""
    return named_with("reward_faults/", metrics)


def skipped_updates(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of skipped updates by reason, such as `no_variance`."""
    return named_with("skipped_updates/", metrics)


def named_with(prefix: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics whose names have this prefix, and remove it from the names."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def totals(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the faults and the skipped updates of all steps, for the summary of a run."""
    faults, skipped = Counter(), Counter()
    for line in lines:
        faults.update(reward_faults(line))
        skipped.update(skipped_updates(line))
    return {"reward_faults": dict(faults), "skipped_updates": dict(skipped)}


class MetricsLog:
    """`metrics.jsonl`: one line per optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def truncate_after(self, step: int) -> None:
        """Drop the lines after `step`, which a resumed run writes again, and an incomplete last line."""
        kept = [line for line in self.read() if line["step"] <= step]
        with atomic_write(self.path) as unfinished:
            unfinished.write_text("".join(map(to_line, kept)))

    def append(self, metrics: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(to_line(metrics))

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines. A damaged line is left out with a warning."""
        if not self.path.exists():
            return []
        lines = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], 1):
            try:
                metrics = json.loads(line)
                lines.append(metrics | {"step": int(metrics["step"])})
            except (ValueError, TypeError, KeyError):
                logger.warning("%s, line %d is damaged and left out", self.path, number)
        return lines


def to_line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(metrics) + "\n"
