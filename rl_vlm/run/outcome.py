"""The outcome of a training run in words: the verdict, a table of changes, and the places of its files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.log.changes import Change, interval, text_of
from rl_vlm.log.metrics import reward_faults
from rl_vlm.log.outcome import aligned, fault_lines, report_lines, skipped_lines
from rl_vlm.run.verdict import SPREAD, CollapseSearch, Evidence, Line, Outcome, Verdict, training_steps

logger = logging.getLogger(__name__)

EXPLORE = (
    "Start again with more exploration: more num_generations, or a KL term (beta 0.02 to 0.1). Or resume from a "
    "checkpoint before it with a lower learning_rate, a higher epsilon_high (0.5), or more num_iterations per rollout."
)
"""The remedy for a collapse."""
MEANINGS = {
    Outcome.LEARNED: "The {name} rose from {before} to {after}{interval}.",
    Outcome.WORSE: "The {name} fell from {before} to {after}{interval}.",
    Outcome.UNCHANGED: "The {name} did not change measurably: {before} at first, {after} at the end{interval}.",
    Outcome.SHORT: "There are too few steps or values to judge the change of the {name}: {before} at first, {after} at "
    "the end{interval}.",
    Outcome.COLLAPSED: "Groups have lost their spread, and the reward is far below the best completions of the first "
    f"groups. The {{name}} went from {{before}} to {{after}}{{interval}}. {EXPLORE}",
    Outcome.CONSTANT: "All completions of a group always had the same reward, so there was nothing to learn from. "
    "Either all answers are right already, or the reward does not tell them apart. `rl-vlm rewards check` and "
    "`rl-vlm doctor` look at the reward functions and at the data.",
    Outcome.FAULTY: "Reward functions failed on a large part of the completions, which were left out of training. "
    "The log has the first fault of each kind.",
}
NOT_EVALUATED = "not evaluated"


def headline(verdict: Verdict) -> str:
    """Return the verdict in a few words: `collapsed at step 22, not evaluated`."""
    return verdict.title if verdict.is_evaluated else f"{verdict.title}, {NOT_EVALUATED}"


def explained(verdict: Verdict) -> str:
    """Return sentences on the verdict, with its main figure, and on missing data."""
    if not verdict.changes:
        return " ".join(["There are no rewards to compare.", *verdict.lacks])
    main = verdict.changes[0]
    before, after = text_of(main)
    of_change = "" if main.low is None or main.has_few else f" (95% interval of the change: {interval(main)})"
    meaning = MEANINGS[verdict.outcome].format(name=main.label, before=before, after=after, interval=of_change)
    return " ".join([meaning, *verdict.lacks])


def changes_table(changes: Sequence[Change]) -> str:
    """Format changes in aligned columns: name, start, end, and the interval of the change."""
    rows = [["", "start", "end", "95% interval of the change"]]
    return aligned([*rows, *([change.label, *text_of(change), interval(change)] for change in changes)])


class CollapseWarning:
    """Logs a warning when a run begins to collapse, once."""

    def __init__(self, earlier: Evidence | None = None) -> None:
        """`earlier` is the evidence of earlier starts of the run."""
        self.search, self.is_given = CollapseSearch(earlier.num_generations if earlier else None), False
        for line in training_steps(earlier.lines if earlier else []):
            self.is_given |= self.search.add(line)

    def give(self, line: Line) -> None:
        """Log the warning if a collapse begins with this line of `metrics.jsonl`."""
        if not training_steps([line]) or not self.search.add(line) or self.is_given:
            return
        self.is_given = True
        metrics = {label: metric for metric, label in SPREAD.items()}
        figures = "; ".join(f"{metrics[change.name]} {' → '.join(text_of(change))}" for change in self.search.changes())
        logger.warning(
            "step %d: the run begins to collapse. Groups have lost their spread since step %d, and the reward is far "
            "below the best completions of the first groups (%s). %s",
            line["step"], self.search.since, figures, EXPLORE,
        )  # fmt: skip


def training_outcome(summary: dict[str, Any], output_dir: str) -> str:
    """Describe a complete run: the verdict, its changes, reward faults, skipped updates, and the places of its files.

    The last line names the report, if there is one.
    """
    directory, verdict = Path(output_dir), Verdict.from_json(summary["verdict"])
    lines = [
        f"Verdict: {headline(verdict)}. {explained(verdict)}",
        *([changes_table(verdict.changes)] if verdict.changes else []),
        f"{summary['optimizer_steps']} optimizer steps took {summary['train_seconds']:.0f} s. The model is "
        f"{summary['checkpoint']}, every completion with its rewards is in {directory / 'completions'}.",
    ]
    faults = [
        *fault_lines(summary.get("reward_faults", {})),
        *fault_lines(reward_faults(summary["eval_after"] or {}), "held-out completions"),
    ]
    return "\n".join([*lines, *skipped_lines(summary), *faults, *report_lines(directory)])


class RunSummary(dict[str, Any]):
    """The content of `summary.json`. It prints as the closing words of the run, with the table of changes."""

    def __repr__(self) -> str:
        if "verdict" not in self:  # on other processes than the first
            return super().__repr__()
        return training_outcome(self, str(Path(self["checkpoint"]).parent))
