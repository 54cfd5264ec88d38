"""Reward functions over groups: call every function, check what it returns, and collect the scores in one table.

A function is called once for all completions, or, if it has a timeout, once per group in a worker process that can be
killed. A fault masks the completions concerned and is counted; see docs/rewards.md.
"""

# ruff: noqa: E402 - refuse_shadow() comes before the imports that it guards

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.errors import RewardError, did_you_mean, listed, shorten
from rl_vlm.functions import LoadError, load_callable
from rl_vlm.names import is_column, is_metric

if TYPE_CHECKING:
    from rl_vlm.types import Group, RewardTable, Sample, TrainerState


def refuse_shadow() -> None:
    """Raise RewardError if `import rewards` would find something other than the package beside this one."""
    ours = Path(__file__).resolve().parents[1] / "rewards" / "__init__.py"
    spec = importlib.util.find_spec("rewards")
    found = spec and (spec.origin or list(spec.submodule_search_locations or []))
    if not isinstance(found, str) or Path(found).resolve() != ours:
        raise RewardError(
            f"`import rewards` finds {found} instead of rl-vlm's own {ours}; rename yours, or start from another "
            "directory (reward functions are named `file.py:function`, so their file may have any name)"
        )


refuse_shadow()

from rewards.calling import (
    OFFERED,
    Call,
    background_loop,
    parameters,
    select_arguments,
    takes_anything,
)
from rewards.contract import Answer, Fault, Score, failed, join
from rewards.forms import OTHER, Form, completion_in, form_of, made_up_completion, prompt_in
from rewards.registry import BUILT_INS
from rewards.worker import Worker

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "rl_vlm.rewards"
NOT_APPLICABLE = "all/not_applicable"
"""Under this name completions are counted that no function applies to."""


class RewardSuite:
    """The reward functions of a run. Close it, or use it as a context manager, to end its worker processes."""

    def __init__(self, config: RewardsConfig) -> None:
        """Load every function. Raises RewardError if one cannot be loaded, has unknown kwargs or another's name."""
        specs = [RewardSpec(function=spec) if isinstance(spec, str) else spec for spec in config.reward_funcs]
        self._rewards = [_Reward(spec) for spec in specs]
        self._warned: set[str] = set()
        self.data_columns: set[str] = set()
        self.names = [reward.name for reward in self._rewards]
        self.weights = config.reward_weights or [spec.weight for spec in specs]
        check_names(self.names)

    @property
    def columns(self) -> set[str]:
        """Return the columns of the data that functions name as parameters."""
        return {key for reward in self._rewards for key in parameters(reward.function) if key not in reward.settings}

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise RewardError if a function needs a column that the data does not have.

        A row without one of these columns gives functions None.
        """
        columns = set(columns)
        for reward in self._rewards:
            reward.check_columns(columns)
        self.data_columns |= columns

    def find_forms(self, example: Sample) -> list[Form | None]:
        """Return the form in which each function can read completions and prompts, judging by one row.

        A function that is not told its form is called on made-up completions: in the form of the row, and if it fails
        on that, in the other one. None leaves every row in its own form. The calls leave nothing in logs or metrics,
        and the global random states as they were.
        """
        with random_states_kept(), chdir("."):
            return [reward.find_form(example) for reward in self._rewards]

    @property
    def forms(self) -> list[Form | None]:
        """Return the form of each function, as `find_forms` returns it."""
        return [reward.form for reward in self._rewards]

    def use_forms(self, forms: Sequence[Form | None]) -> None:
        """Give each function completions and prompts in this form."""
        for reward, form in zip(self._rewards, forms, strict=True):
            reward.form = form

    def score(self, groups: Sequence[Group], state: TrainerState) -> RewardTable:
        """Call every function on all completions. Async functions and those with a timeout run concurrently.

        Groups must have the same number of completions. Faults mask completions and are never raised.
        """
        if not groups:
            return self._table(groups, [Answer([]) for _ in self._rewards])
        with chdir("."):
            waiting = [reward.start(groups, state, reward.form, self.data_columns) for reward in self._rewards]
            answers = [wait() for wait in waiting]
        return self._table(groups, answers)

    def close(self) -> None:
        """End the worker processes; the next call would restart them."""
        for reward in self._rewards:
            if reward.worker:
                reward.worker.close()

    def __enter__(self) -> RewardSuite:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _table(self, groups: Sequence[Group], answers: Sequence[Answer]) -> RewardTable:
        import torch  # not at the top: a dry run loads the functions and does not need torch

        from rl_vlm.types import RewardTable

        answers = without_taken_names(self.names, answers)
        group_size = len(groups[0].completions) if groups else 0
        shape = (len(self.names), len(groups), group_size)
        scores_FPG = torch.tensor([[_as_float(score) for score in answer.scores] for answer in answers]).reshape(shape)
        faulted = [[isinstance(score, Fault) for score in answer.scores] for answer in answers]
        faulted_PG = torch.tensor(faulted, dtype=torch.bool).reshape(shape).any(dim=0)
        unscored_PG = scores_FPG.isnan().all(dim=0)
        table = RewardTable(self.names, scores_FPG.permute(1, 2, 0), ~faulted_PG & ~unscored_PG, faulted_PG)

        for name, answer in zip(self.names, answers, strict=True):
            columns = {f"{name}/{sub}": values for sub, values in answer.sub_scores.items()} | answer.extras
            for column, values in columns.items():
                table.breakdown[column] = [values[i : i + group_size] for i in range(0, len(values), group_size)]
            for metric, logged in answer.metrics.items():
                table.metrics.setdefault(metric, []).extend(logged)
            self._count_faults(name, answer.scores, groups, table)
        nothing = Fault("not_applicable", "no reward function applies")
        unscored = (unscored_PG & ~faulted_PG).flatten().tolist()
        self._count_faults("all", [nothing if masked else None for masked in unscored], groups, table)
        return table

    def _count_faults(self, name: str, scores: Sequence[Score], groups: Sequence[Group], table: RewardTable) -> None:
        """Add the faults among the scores to the table, and log the first of each function and kind."""
        rows = [(group.prompt.sample.sample_id, i) for group in groups for i in range(len(group.completions))]
        places: dict[Fault, dict[str, list[int]]] = {}
        for (sample_id, i), score in zip(rows, scores, strict=True):
            if isinstance(score, Fault):
                places.setdefault(score, {}).setdefault(sample_id, []).append(i)
        for fault, masked in places.items():
            key = f"{name}/{fault.kind}"
            table.fault_counts[key] = table.fault_counts.get(key, 0) + sum(map(len, masked.values()))
            where = ", ".join(f"{sample_id} {completions}" for sample_id, completions in masked.items())
            message = shorten(f"{key}: {fault.message}; masked completions of samples: {where}")
            table.fault_messages.append(message)
            if key not in self._warned:
                self._warned.add(key)
                logger.warning("%s; later faults of this kind are counted, not logged", message)


class _Reward:
    """One reward function with its settings, and its worker if it has a timeout."""

    def __init__(self, spec: RewardSpec) -> None:
        load = partial(load_callable, spec.function, BUILT_INS, ENTRY_POINT_GROUP)
        try:
            with chdir("."):
                self.function = load()
        except LoadError as error:
            raise RewardError(f"reward function {spec.function!r}: {error}") from error
        self.name = spec.name or getattr(self.function, "__name__", type(self.function).__name__)
        try:
            known = parameters(self.function)
        except ValueError as error:
            raise RewardError(f"reward function {spec.function!r} cannot be called by name: {error}") from error
        for key in spec.kwargs:
            if key not in known and not takes_anything(self.function):
                hint = did_you_mean(key, known)
                raise RewardError(
                    f"reward function {self.name!r} has no argument {key!r}{hint}; it takes {listed(known)}"
                )
        # Defaults of built-ins are passed as well, so that a column called `tags` does not become a setting.
        is_built_in = spec.function in BUILT_INS
        defaults = {key: p.default for key, p in known.items() if is_built_in and p.kind is p.KEYWORD_ONLY}
        self.settings = defaults | spec.kwargs
        self.worker = Worker(load, spec.timeout) if spec.timeout else None
        self.form: Form | None = None if spec.completions == "auto" else spec.completions
        reads_form = {"prompts", "completions"} & known.keys() or takes_anything(self.function)
        self.probes_form = spec.completions == "auto" and bool(reads_form) and not is_built_in

    def check_columns(self, columns: set[str]) -> None:
        """Raise RewardError if a parameter without a default would get no value."""
        for key, parameter in parameters(self.function).items():
            if parameter.default is parameter.empty and key not in columns.union(OFFERED, self.settings):
                raise RewardError(
                    f"reward function {self.name!r} needs a column {key!r}{did_you_mean(key, columns)}; "
                    f"the data has: {listed(columns)}"
                )

    def find_form(self, example: Sample) -> Form | None:
        """Return the form that the function can read, or None for each row's own; see `RewardSuite.find_forms`."""
        if not self.probes_form:
            return self.form
        natural = form_of(example.prompt)
        fault = self.probe(example, natural)
        if fault is None:
            return natural
        may_read_other = fault.kind not in ("timeout", "load") and self.probe(example, natural) is not None
        if may_read_other and self.probe(example, OTHER[natural]) is None:
            found, form = f"it gets them as {OTHER[natural]}, which it reads", OTHER[natural]
        else:
            found, form = f"it gets them as {natural} nevertheless", None
        logger.warning(
            "reward function %r fails on made-up completions as %s, the form of the data: %s; %s. `completions` in its "
            "entry of rewards.reward_funcs sets the form",
            *(self.name, natural, fault.message, found),
        )
        return form

    def probe(self, example: Sample, form: Form) -> Fault | None:
        """Call the function on two made-up completions in this form, and return the fault, if there is one."""
        import torch

        from rl_vlm.types import Completion, Group, Prompt, TrainerState

        text = made_up_completion(example.columns)
        completion = Completion(torch.arange(len(text)), torch.zeros(len(text)), "stop", text)
        group = Group("made-up", Prompt(example, torch.empty(0, dtype=torch.int64), {}, {}), [completion] * 2, 0)
        state = TrainerState(global_step=0, max_steps=1, epoch=0.0)
        answer = self.start([group], state, form, example.columns)()
        return next((score for score in answer.scores if isinstance(score, Fault)), None)

    def start(
        self, groups: Sequence[Group], state: TrainerState, form: Form | None, data_columns: Iterable[str]
    ) -> Callable[[], Answer]:
        """Start the call, or one call per group in the worker. Returns a function that waits for the answer."""
        columns = {column for group in groups for column in group.prompt.sample.columns}.union(data_columns)
        # A plain namespace, since a worker would have to import torch to unpickle the class.
        constants = {**self.settings, "trainer_state": SimpleNamespace(**vars(state))}

        def batch(groups: Sequence[Group]) -> tuple[dict[str, Any], int]:
            arguments = _arguments(groups, columns, form)
            return select_arguments(self.function, arguments | constants), len(arguments["completions"])

        if self.worker is None:
            return Call(self.function, *batch(groups)).answer
        call = asyncio.to_thread(self.worker.call, [batch([group]) for group in groups])
        answers = asyncio.run_coroutine_threadsafe(call, background_loop())
        return lambda: join(answers.result())


def _arguments(groups: Sequence[Group], columns: Iterable[str], form: Form | None) -> dict[str, list[Any]]:
    """Build the arguments of TRL's protocol that have one entry per completion; None for a row without the column.

    Prompts and completions have the given form, or that of their row.
    """
    rows = [(group.prompt.sample, completion) for group in groups for completion in group.completions]
    return {
        **{column: [sample.columns.get(column) for sample, _ in rows] for column in columns},
        "prompts": [prompt_in(form, sample.prompt) for sample, _ in rows],
        "completions": [completion_in(form or form_of(sample.prompt), completion.text) for sample, completion in rows],
        "completion_ids": [completion.token_ids.tolist() for _, completion in rows],
        "images": [sample.images for sample, _ in rows],
    }


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the states of the global random generators after a block."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def check_names(names: Sequence[str]) -> None:
    """Raise RewardError if two functions have one name, or if a function has a name that the run itself writes."""
    for name in names:
        if names.count(name) > 1:
            raise RewardError(f"{names.count(name)} reward functions are called {name!r}: give each a `name`")
        if is_column(name) or is_column(f"{name}/") or name == "all" or "/" in name:
            raise RewardError(
                f"a reward function cannot be called {name!r}: names with a slash and those of the run's own columns "
                "and counts are taken; give it another `name`"
            )


def without_taken_names(names: Sequence[str], answers: Sequence[Answer]) -> list[Answer]:
    """Replace the answers that log under a name of the run or of another function by faults."""
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


def _as_float(score: Score) -> float:
    return score if isinstance(score, float) else math.nan
