"""One reward function with its settings. Loads it, finds the form in which it reads completions, and calls it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from inspect import Parameter
from itertools import chain, compress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards.adapters import Adapted, adapt
from rewards.calling import OFFERED, Call, background_loop, parameters, select_arguments, takes_anything
from rewards.contract import Answer, Fault, RewardFunction, join, spread
from rewards.forms import OTHER, CompletionForm, form_of, prompt_in
from rewards.registry import ASKS_A_MODEL, BUILT_INS, PACKAGES, TIMEOUTS
from rewards.stand_ins import REGISTRY, stand_ins
from rewards.worker import Worker
from rl_vlm.config.schema import RewardSpec
from rl_vlm.distributed.signals import stop, wait_for, wait_until_done
from rl_vlm.errors import RewardError, did_you_mean, listed
from rl_vlm.functions import LIVE, LoadError, label_of, live, load_callable
from rl_vlm.reward.conversation import completion_as, turns_of
from rl_vlm.reward.made_up import made_up_completion, made_up_group, state_outside
from rl_vlm.reward.settings import check_settings

if TYPE_CHECKING:
    from rl_vlm.types import Group, Prompt, Sample, TrainerState

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "rl_vlm.rewards"
PATCH = 14
"""Pixels by which VLM-R1's functions multiply `image_grid_thw`, the patches of Qwen2-VL and Qwen2.5-VL."""


class Reward:
    """One reward function with its settings, and its worker if it has a timeout."""

    def __init__(self, spec: RewardSpec, has_environment: bool = False) -> None:
        """Load the function, for a run with or without an environment.

        Raises RewardError if this fails, or if the function cannot use one of the settings.
        """
        require_packages(spec.function)
        self.spec = spec
        try:
            with chdir("."):
                adapted = load_reward(spec.function, list(spec.kwargs))
        except LoadError as error:
            raise RewardError(f"reward function {spec.function!r}: {error}") from error
        self.function = adapted.function
        self.system = adapted.system
        self.name = spec.name or label_of(self.function)
        self.weight = spec.weight
        self.solved_from = spec.solved_from
        is_built_in = spec.function in BUILT_INS
        self.settings = self.checked_settings(spec, no_columns=is_built_in or adapted.is_wrapped)
        if is_built_in:
            check_settings(spec.function, self.function, self.settings, spec.solved_from)
        self.applies_to = {column: as_list(values) for column, values in spec.applies_to.items()}
        self.calls = spec.calls
        self.must_not_fail = spec.on_error == "raise"
        self.asks_a_model = spec.function in ASKS_A_MODEL
        timeout = spec.timeout or TIMEOUTS.get(spec.function)
        objects = {spec.function: LIVE[spec.function]} if spec.function in LIVE else {}
        self.worker = (
            Worker(partial(load_function_alone, spec.function, list(spec.kwargs), objects), timeout)
            if timeout
            else None
        )
        self.has_environment = has_environment
        if has_environment and self.worker is not None and "environments" in self.columns:
            raise RewardError(
                f"reward function {self.name!r} reads `environments` and has a timeout, so it runs in a process that "
                "has no environments: leave out its `timeout`, or read `turns`"
            )
        self.form: CompletionForm | None = adapted.form if spec.completions == "auto" else spec.completions
        reads_form = {"prompts", "completions"} & parameters(self.function).keys() or takes_anything(self.function)
        self.probes_form = spec.completions == "auto" and not adapted.form and bool(reads_form) and not is_built_in
        if adapted.system:
            logger.info("reward function %r has the protocol of %s", self.name, adapted.system)
        if adapted.missing:
            logger.warning(
                "the file of reward function %r imports %s of ms-swift, which rl-vlm does not have: code that uses it "
                "fails",
                *(self.name, listed(adapted.missing)),
            )

    def checked_settings(self, spec: RewardSpec, no_columns: bool) -> dict[str, Any]:
        """Return the settings that every call gets. With `no_columns`, keyword-only parameters are never data columns.

        Raises RewardError if the function has no argument for a setting, or if a required setting is missing.
        """
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
        # Defaults are also passed, so that a data column called `tags` does not become a setting.
        defaults = {key: p.default for key, p in known.items() if no_columns and p.kind is p.KEYWORD_ONLY}
        settings = defaults | spec.kwargs
        if missing := [key for key, value in settings.items() if value is Parameter.empty]:
            raise RewardError(f"reward function {self.name!r} needs {listed(missing)}: set its `kwargs`")
        return settings

    @property
    def columns(self) -> set[str]:
        """Return the data columns that the function names as parameters."""
        return parameters(self.function).keys() - self.settings.keys()

    def reads_turns(self, columns: Iterable[str]) -> bool:
        """Return whether the function reads turns or environments, which made-up completions do not have.

        `columns` are the columns of the data, which may have one of these names.
        """
        return not ({"turns", "environments"} & self.columns).issubset(columns)

    def applies(self, columns: Mapping[str, Any]) -> bool:
        """Return whether the function is called for a row with these columns."""
        return all(columns.get(column) in values for column, values in self.applies_to.items())

    def check_columns(self, columns: set[str]) -> None:
        """Raise RewardError if a parameter without a default would get no value."""
        for key, parameter in parameters(self.function).items():
            if parameter.default is not parameter.empty or key in columns.union(self.settings):
                continue
            if key == "environments" and not self.has_environment:
                raise RewardError(
                    f"reward function {self.name!r} reads `environments`, and the run has none: set "
                    "`rollout.environment`"
                )
            if key not in OFFERED:
                raise RewardError(
                    f"reward function {self.name!r} needs a column {key!r}{did_you_mean(key, columns)}; "
                    f"the data has: {listed(columns)}"
                )
        for column in self.applies_to.keys() - columns:
            raise RewardError(
                f"reward function {self.name!r} has applies_to: {column}, but the data has no such column"
                f"{did_you_mean(column, columns)}; it has: {listed(columns)}"
            )

    def find_form(self, example: Sample) -> CompletionForm | None:
        """Return the form that the function can read, or None for each row's form. See `RewardSuite.find_forms`."""
        if not self.probes_form or self.reads_turns(example.columns):
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

    def use_form(self, form: CompletionForm | None) -> None:
        """Pass completions and prompts in this form from now on. None leaves every row in its own form."""
        self.form = form

    def probe(self, example: Sample, form: CompletionForm) -> Fault | None:
        """Call the function on two made-up completions in this form. Return the fault, or None."""
        group = made_up_group(example, [made_up_completion(example.columns)] * 2)
        answer = self.start([group], state_outside(), form, example.columns)()
        return next((score for score in answer.scores if isinstance(score, Fault)), None)

    def start(
        self, groups: Sequence[Group], state: TrainerState, form: CompletionForm | None, data_columns: Iterable[str]
    ) -> Callable[[], Answer]:
        """Start the calls for the completions that the function scores. Return a function that waits for the answer."""
        scored = [self.scores(group) for group in groups]
        mine = [members_of(group, chosen) for group, chosen in zip(groups, scored, strict=True) if any(chosen)]
        wait = self.start_calls(mine, state, form, data_columns) if mine else lambda: Answer([])
        of_completions = list(chain.from_iterable(scored))
        return wait if all(of_completions) else lambda: spread(wait(), of_completions)

    def scores(self, group: Group) -> list[bool]:
        """Return whether each completion is scored: the function applies to it, and its environment did not fail."""
        applies = self.applies(group.prompt.sample.columns)
        return [applies and completion.fault is None for completion in group.completions]

    def start_calls(
        self, groups: Sequence[Group], state: TrainerState, form: CompletionForm | None, data_columns: Iterable[str]
    ) -> Callable[[], Answer]:
        """Start one call for all groups, or one call per group if `calls` says so or the function has a worker."""
        columns = {column for group in groups for column in group.prompt.sample.columns}.union(data_columns)
        # A plain namespace: to unpickle TrainerState, a worker would have to import torch.
        constants = {**self.settings, "trainer_state": SimpleNamespace(**vars(state))}

        def batch(groups: Sequence[Group]) -> tuple[dict[str, Any], int]:
            offered = arguments(groups, columns, form)
            if self.worker is not None:
                offered.pop("environments", None)  # they stay in this process
            return select_arguments(self.function, offered | constants), len(offered["completions"])

        if self.worker is not None:
            answers = asyncio.to_thread(self.worker.call, [batch([group]) for group in groups])
            waiting = asyncio.run_coroutine_threadsafe(answers, background_loop("rewards"))
            return lambda: join(wait_for(waiting))
        parts = [groups] if self.calls == "window" else [[group] for group in groups]
        calls = [Call(self.function, *batch(part)) for part in stop.checked(parts)]
        stop.check()  # if a signal came during the last call, its KeyboardInterrupt became a fault

        def wait_for_calls() -> list[Answer]:
            for call in calls:
                wait_until_done(call.returned)
            return [call.answer() for call in calls]

        return lambda: join(wait_for_calls())


def members_of(group: Group, chosen: Sequence[bool]) -> Group:
    """Return a group with the chosen completions."""
    return group if all(chosen) else replace(group, completions=list(compress(group.completions, chosen)))


def arguments(groups: Sequence[Group], columns: Iterable[str], form: CompletionForm | None) -> dict[str, list[Any]]:
    """Build the arguments of TRL's protocol: one list per argument, with one entry per completion.

    The entry is None if a row lacks the column. Prompts and completions have the given form, or their row's form if it
    is None. A column of the data replaces `turns`, `finish_reasons`, and arguments of VLM-R1 and videos.
    `environments` are there if a completion has one.
    """
    rows = [(group.prompt_of(i), completion) for group in groups for i, completion in enumerate(group.completions)]
    samples = [prompt.sample for prompt, _ in rows]
    videos = [sample.all_videos for sample in samples]
    has_environment = any(completion.environment_name for _, completion in rows)
    return {
        "turns": [turns_of(completion.turns) for _, completion in rows],
        "finish_reasons": [completion.finish_reason for _, completion in rows],
        "image_path": [sample.without_frames(sample.image_files) for sample in samples],
        "image_grid_thw": [image_grid(prompt) for prompt, _ in rows],
        "video_duration": [[video.duration for video in each] for each in videos],
        "video_frame_times": [[video.times for video in each] for each in videos],
        **{column: [sample.columns.get(column) for sample in samples] for column in columns},
        "prompts": [prompt_in(form, sample.prompt) for sample in samples],
        "completions": [completion_as(form or form_of(p.sample.prompt), completion) for p, completion in rows],
        "completion_ids": [completion.paths[-1].token_ids.tolist() for _, completion in rows],
        "images": [sample.own_images for sample in samples],
        "image_sizes": [[image.size for image in sample.own_images] for sample in samples],
        "model_image_sizes": [prompt.own_image_sizes for prompt, _ in rows],
        **({"environments": [completion.environment for _, completion in rows]} if has_environment else {}),
    }


def image_grid(prompt: Prompt) -> list[Any] | None:
    """Return VLM-R1's `image_grid_thw` of the first image: 1, and its height and width in patches of 14 pixels.

    Fractions of patches are exact. None if there is no image, or if the model's size of it is unknown.
    """
    if not prompt.own_image_sizes:
        return None
    sides = [Fraction(side, PATCH) for side in reversed(prompt.own_image_sizes[0])]
    return [1, *(int(side) if side.denominator == 1 else side for side in sides)]


def missing_packages(name: str) -> list[str]:
    """Return the packages that a built-in needs and that are not installed."""
    return [package for package in PACKAGES.get(name, ()) if find_spec(package) is None]


def require_packages(name: str) -> None:
    """Raise RewardError if a built-in or a TRL function needs a package that is not installed."""
    if missing := missing_packages(name):
        raise RewardError(f"reward function {name!r} needs {listed(missing)}: pip install -e '.[rewards]'")
    if name.startswith("trl.") and find_spec("trl") is None:
        raise RewardError(f"reward function {name!r} is one of TRL: pip install -e '.[trl]'")


def load_reward(name: str, kwargs: Sequence[str]) -> Adapted:
    """Load a function by its name, and adapt it to TRL's protocol. Raises LoadError if it cannot be loaded.

    `kwargs` are the names of the settings that it will get.
    """
    with stand_ins() as missing:
        adapted = adapt(load_callable(name, BUILT_INS, ENTRY_POINT_GROUP, REGISTRY), kwargs)
    return replace(adapted, missing=tuple(missing))


def load_function_alone(name: str, kwargs: Sequence[str], objects: Mapping[str, RewardFunction]) -> RewardFunction:
    """Load a function in a worker process. `objects` are the main process's objects that `name` may refer to."""
    with live(objects):
        return load_reward(name, kwargs).function


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
