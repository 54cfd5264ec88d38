"""All reward functions of a run: calls every function on every group, and collects the scores in one table.

A fault masks its completions and is counted. See docs/rewards.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from typing import TYPE_CHECKING, Any

from rewards.contract import Answer, Fault, Score, failed, on_one_line, read_score
from rewards.forms import CompletionForm
from rl_vlm.config.schema import RewardsConfig
from rl_vlm.config.secrets import without_secrets
from rl_vlm.errors import Problems, RewardError, shorten
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.stages import TAKEN_NAME, is_column, is_metric, is_taken

if TYPE_CHECKING:
    from rl_vlm.types import FaultKey, Group, RewardTable, Sample, TrainerState

logger = logging.getLogger(__name__)

NOT_APPLICABLE = "all/not_applicable"
"""Counts completions that no function applies to."""


class RewardSuite:
    """The reward functions of a run. Close it, or use it as a context manager, to end its worker processes."""

    def __init__(self, config: RewardsConfig, environments: Sequence[str] | None = None) -> None:
        """Load every function. Raises RewardError if some cannot be loaded, have unknown kwargs, or share a name.

        `environments` are the classes with `get_reward`, by name. Each is one more reward, of weight 1. None: the run
        has no environment.
        """
        problems = Problems()
        loaded = [problems.call(Reward, spec, environments is not None) for spec in config.specs]
        problems.refuse()
        self._rewards = [reward for reward in loaded if reward is not None]
        self._environments = list(environments or ())
        self._warned: set[FaultKey] = set()
        self.data_columns: set[str] = set()
        self.names = [*(reward.name for reward in self._rewards), *self._environments]
        of_functions = config.reward_weights or [reward.weight for reward in self._rewards]
        self.weights = [*of_functions, *(1.0 for _ in self._environments)]
        self.solved_from = {reward.name: reward.solved_from for reward in self._rewards}
        self.solved_from |= dict.fromkeys(self._environments, 1.0)
        check_names(self.names, self._environments)

    def check_weights(self) -> None:
        """Raise RewardError if no reward has a weight, so that completions have no reward."""
        if not any(self.weights):
            raise RewardError(
                "no reward has a weight: set `rewards.reward_funcs`, or write a method `get_reward` of the environment"
            )

    @property
    def functions(self) -> list[Reward]:
        """Return the functions."""
        return self._rewards

    @property
    def decisive(self) -> str:
        """Return the first function with the largest weight."""
        return self.names[self.weights.index(max(self.weights))]

    @property
    def columns(self) -> set[str]:
        """Return the data columns that functions name as parameters."""
        return {column for reward in self._rewards for column in reward.columns}

    @property
    def reads_environments(self) -> bool:
        """Return whether a function names `environments`, the instances of environments."""
        return "environments" in self.columns

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise RewardError if functions need columns that the data does not have.

        If a single row lacks such a column, functions get None.
        """
        columns, problems = set(columns), Problems()
        for reward in self._rewards:
            problems.call(reward.check_columns, columns)
        problems.refuse()
        self.data_columns |= columns

    def find_forms(
        self, example: Callable[[Callable[[Mapping[str, Any]], bool]], Sample]
    ) -> list[CompletionForm | None]:
        """Return the form in which each function can read completions and prompts, judging by one row.

        `example` returns a row whose columns pass a test. The test is whether the function applies to the row.

        If a function's form is not set, it is called on made-up completions: in the row's form, and if it fails, in the
        other form. None leaves every row in its own form. The calls do not change logs, metrics or the global random
        states.
        """
        with random_states_kept(), chdir("."):
            return [reward.find_form(example(reward.applies)) for reward in self._rewards]

    @property
    def forms(self) -> list[CompletionForm | None]:
        """Return the form of each function, as from `find_forms`."""
        return [reward.form for reward in self._rewards]

    def use_forms(self, forms: Sequence[CompletionForm | None]) -> None:
        """Set the form of completions and prompts for each function."""
        for reward, form in zip(self._rewards, forms, strict=True):
            reward.use_form(form)

    def score(self, groups: Sequence[Group], state: TrainerState) -> RewardTable:
        """Call every function on all completions. Async functions and functions with a timeout run concurrently.

        Groups must have the same number of completions. Faults mask completions and are never raised.
        """
        if not groups:
            return self._table(groups, [Answer([]) for _ in self.names])
        with chdir("."):
            waiting = [reward.start(groups, state, reward.form, self.data_columns) for reward in self._rewards]
            answers = [wait() for wait in waiting]
        return self._table(groups, [*answers, *(rewards_of(name, groups) for name in self._environments)])

    @property
    def must_not_fail(self) -> list[str]:
        """Return the names of the functions with `on_error: raise`."""
        return [reward.name for reward in self._rewards if reward.must_not_fail]

    def close(self) -> None:
        """End the worker processes. The next call would restart them."""
        for reward in self._rewards:
            if reward.worker:
                reward.worker.close()

    def __enter__(self) -> RewardSuite:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _table(self, groups: Sequence[Group], answers: Sequence[Answer]) -> RewardTable:
        import torch  # not at the top: a dry run imports this module without torch

        from rl_vlm.types import RewardTable

        answers = without_taken_names(self.names, answers)
        group_size = len(groups[0].completions) if groups else 0
        shape = (len(self.names), len(groups), group_size)
        numbers = [[score if isinstance(score, float) else math.nan for score in answer.scores] for answer in answers]
        scores_FPG = torch.tensor(numbers).reshape(shape)
        failures = faults_of_environments(groups)
        faulted = [
            [isinstance(score, Fault) for score in scores] for scores in (failures, *(a.scores for a in answers))
        ]
        faulted_PG = torch.tensor(faulted, dtype=torch.bool).reshape(1 + shape[0], *shape[1:]).any(dim=0)
        unscored_PG = scores_FPG.isnan().all(dim=0)
        table = RewardTable(self.names, scores_FPG.permute(1, 2, 0), ~faulted_PG & ~unscored_PG, faulted_PG)

        for name, answer in zip(self.names, answers, strict=True):
            columns = {f"{name}/{sub}": values for sub, values in answer.sub_scores.items()} | answer.extras
            for column, values in columns.items():
                table.breakdown[column] = [values[i : i + group_size] for i in range(0, len(values), group_size)]
            for metric, logged in answer.metrics.items():
                table.metrics.setdefault(metric, []).extend(logged)
            self._count_faults(name, answer.scores, groups, table)
        self._count_faults("environment", failures, groups, table)
        nothing = Fault("not_applicable", "no reward function applies")
        unscored = (unscored_PG & ~faulted_PG).flatten().tolist()
        self._count_faults("all", [nothing if masked else None for masked in unscored], groups, table)
        return table

    def _count_faults(self, name: str, scores: Sequence[Score], groups: Sequence[Group], table: RewardTable) -> None:
        """Add the faults among the scores to the table, and log the first of each function and kind."""
        from rl_vlm.types import FaultKey

        rows = [(p, i) for p, group in enumerate(groups) for i in range(len(group.completions))]
        places: dict[Fault, dict[str, list[int]]] = {}
        for (p, i), score in zip(rows, scores, strict=True):
            if isinstance(score, Fault):
                places.setdefault(score, {}).setdefault(groups[p].prompt.sample.sample_id, []).append(i)
                table.faults.setdefault((p, i), []).append(shown(f"{name}/{score}"))
        for fault, masked in places.items():
            key = FaultKey(name, fault.kind)
            table.fault_counts[key] = table.fault_counts.get(key, 0) + sum(map(len, masked.values()))
            where = ", ".join(f"{sample_id} {completions}" for sample_id, completions in masked.items())
            message = shown(f"{name}/{fault}; masked completions of samples: {where}")
            table.fault_messages.setdefault(key, message)
            if key not in self._warned:
                self._warned.add(key)
                logger.warning("%s; later faults of this kind are counted, not logged", message)


def rewards_of(environment: str, groups: Sequence[Group]) -> Answer:
    """Return the values of `get_reward` for the completions of one environment. None for all others."""
    completions = [completion for group in groups for completion in group.completions]
    return Answer(
        [
            read_score(completion.environment_reward)
            if completion.environment_name == environment and completion.fault is None
            else None
            for completion in completions
        ]
    )


def faults_of_environments(groups: Sequence[Group]) -> list[Fault | None]:
    """Return the fault of each completion's environment, or None."""
    faults = [completion.fault for group in groups for completion in group.completions]
    return [fault and Fault(fault.kind, on_one_line(fault.message)) for fault in faults]


def check_names(names: Sequence[str], environments: Sequence[str] = ()) -> None:
    """Raise RewardError if two rewards have the same name, or if the run itself logs under a reward's name.

    `environments` are the names of classes with `get_reward` among them.
    """
    problems = Problems()
    for name in dict.fromkeys(names):
        problems.call(check_name, name, names.count(name), name in environments)
    problems.refuse()


def check_name(name: str, number: int, is_environment: bool) -> None:
    """Raise RewardError if a `number` of rewards with this name cannot be in one run."""
    if number > 1 and is_environment:
        raise RewardError(f"{number} rewards are called {name!r}, as a class with `get_reward`: rename one")
    if number > 1:
        raise RewardError(f"{number} reward functions are called {name!r}: give each a `name`")
    if is_taken(name):
        raise RewardError(f"a reward function cannot be called {name!r}: {TAKEN_NAME}")


def without_taken_names(names: Sequence[str], answers: Sequence[Answer]) -> list[Answer]:
    """Replace an answer by faults if it logs under a name of the run or of another function."""
    owners = {name: name for name in names}
    owners |= {f"{name}/{sub}": name for name, answer in zip(names, answers, strict=True) for sub in answer.sub_scores}
    checked = []
    for name, answer in zip(names, answers, strict=True):
        problems = [f"log_metric({metric!r})" for metric in answer.metrics if is_metric(metric)]
        problems += [f"log_extra({column!r})" for column in answer.extras if is_column(column) or column in owners]
        owners |= dict.fromkeys(answer.extras, name)
        fault = Fault("name", f"{', '.join(problems)}: the run or another function has this name; choose another")
        checked.append(failed(fault, len(answer.scores)) if problems else answer)
    return checked


def shown(text: str) -> str:
    """Format the text of a fault for files and the log."""
    return shorten(without_secrets(text))
