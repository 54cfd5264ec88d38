"""Adapters for reward functions of other systems. They call a function by its own system's protocol.

A function is recognised by the arguments that it names, or by the class that it derives from:

    EasyR1     compute_score(reward_inputs), a list of dicts, or compute_score(reward_input), one dict
    verl       compute_score(data_source, solution_str, ground_truth, extra_info)
    ms-swift   a class derived from ORM, called as in TRL, with completions as text
    VLM-R1     a function with **kwargs that reads `accu_reward_method`, `image_path` or `image_grid_thw`, as in TRL

Other functions of TRL and VLM-R1 need no adapter.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from rewards.calling import or_fault
from rewards.contract import Fault, RewardFunction
from rewards.forms import CompletionForm
from rewards.text import completion_text

GOLD_COLUMNS = ("ground_truth", "reward_model", "solution", "answer")
"""Columns that usually hold the gold answer."""
ROW_COLUMNS = ("data_source", "extra_info")
"""Columns of verl that describe the origin of a row."""
METHOD_COLUMN = "accu_reward_method"
"""Column of VLM-R1's loader: how to compare an answer. Its loader fills it with `DEFAULT_METHOD`."""
DEFAULT_METHOD = "default"
IMAGE_ARGUMENTS = ("image_path", "image_grid_thw")
"""Arguments of VLM-R1 about the images of a row."""
READ_COLUMNS = ("completion_ids", *ROW_COLUMNS, *GOLD_COLUMNS)


@dataclass(frozen=True)
class Row:
    """One completion with the data that other systems pass to a function."""

    response: str
    response_length: int
    ground_truth: Any
    data_source: Any
    extra_info: Any

    @property
    def reward_input(self) -> dict[str, Any]:
        """Return the row in EasyR1's form."""
        return {name: getattr(self, name) for name in ("response", "response_length", "ground_truth")}


@dataclass(frozen=True)
class Protocol:
    """A system's way of calling its functions."""

    system: str
    arguments: dict[str, str]
    """The fields of `Row` to pass, by the names of the function's arguments. Names that are unique to this system come
    first."""
    num_own: int
    """Number of first names that identify the function. It need not take the others."""
    in_batches: bool
    """Whether each argument is a list over all completions. Otherwise there is one call per completion."""
    reward_key: str
    """Key of the score in a returned dict."""


PROTOCOLS = (
    Protocol("EasyR1", {"reward_inputs": "reward_input"}, 1, True, "overall"),
    Protocol("EasyR1", {"reward_input": "reward_input"}, 1, False, "overall"),
    Protocol("EasyR1", {"predicts": "response", "ground_truths": "ground_truth"}, 2, True, "overall"),
    Protocol("EasyR1", {"predict": "response", "ground_truth": "ground_truth"}, 2, False, "overall"),
    Protocol("EasyR1", {"predict_str": "response", "ground_truth": "ground_truth"}, 2, False, "overall"),
    Protocol(
        "verl",
        {"solution_str": "response", "ground_truth": "ground_truth", "data_source": "data_source",
         "extra_info": "extra_info"},
        2, False, "score",
    ),
    Protocol(
        "verl",
        {"solution_strs": "response", "ground_truths": "ground_truth", "data_sources": "data_source",
         "extra_infos": "extra_info"},
        2, True, "score",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Adapted:
    """A function that is called as in TRL, with facts about it."""

    function: RewardFunction
    system: str | None = None
    """The system that the function was written for, if its protocol differs."""
    form: CompletionForm | None = None
    """The form in which the function gets completions, or None if it is unknown."""
    is_wrapped: bool = False
    """Whether its keyword-only parameters are settings. No data column sets them."""
    missing: tuple[str, ...] = ()
    """Names of ms-swift that its file imports and that have no stand-in."""


def adapt(function: RewardFunction, kwargs: Sequence[str] = ()) -> Adapted:
    """Adapt a function of any of these systems, so that it is called as in TRL.

    `kwargs` are the names of the settings that it will get. If it has `**kwargs`, it takes settings of any name.
    """
    if any(base.__name__ in ("ORM", "AsyncORM") for base in type(function).__mro__):
        return Adapted(function, "ms-swift", "text")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it cannot be called by name; a later check reports it
        return Adapted(function)
    for protocol in PROTOCOLS:
        if set(list(protocol.arguments)[: protocol.num_own]) <= parameters.keys():
            wrapper = wrapped(function, protocol, settings_of(parameters, protocol, kwargs))
            return Adapted(wrapper, protocol.system, "text", is_wrapped=True)
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        read = {METHOD_COLUMN, *IMAGE_ARGUMENTS}.intersection(constants_of(getattr(function, "__code__", None)))
        if read:
            return Adapted(of_vlm_r1(function, read), "VLM-R1", "messages")
    return Adapted(function)


def constants_of(code: Any) -> Iterator[Any]:
    """Yield the constants of a function's code, and of the functions in it."""
    for constant in getattr(code, "co_consts", ()):
        yield constant
        yield from constants_of(constant)


def of_vlm_r1(function: RewardFunction, read: Set[str]) -> RewardFunction:
    """Wrap a function of VLM-R1 that reads these names in `**kwargs`. Fill `accu_reward_method` as its loader does."""

    @functools.wraps(function)
    def call(completions: Sequence[Any], **given: Any) -> Any:
        if METHOD_COLUMN in read:
            method = given.get(METHOD_COLUMN)
            methods = [method] * len(completions) if method is None or isinstance(method, str) else method
            given[METHOD_COLUMN] = [each or DEFAULT_METHOD for each in methods]
        return function(completions=completions, **given)

    parameters = inspect.signature(function).parameters
    added = [name for name in IMAGE_ARGUMENTS if name in read and name not in parameters]
    named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in added]
    by_kind = sorted([*parameters.values(), *named], key=lambda parameter: parameter.kind)
    call.__signature__ = inspect.Signature(by_kind)  # type: ignore[attr-defined]
    return call


def settings_of(parameters: Mapping[str, Parameter], protocol: Protocol, kwargs: Sequence[str]) -> list[Parameter]:
    """Return the parameters other than protocol arguments and columns. With `**kwargs`, add the names in `kwargs`."""
    taken = {*protocol.arguments, *READ_COLUMNS}
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    settings = {name: p for name, p in parameters.items() if name not in taken and p.kind in named}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        settings |= {name: Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs if name not in settings}
    return [p.replace(kind=Parameter.KEYWORD_ONLY) for p in settings.values()]


def wrapped(function: RewardFunction, protocol: Protocol, settings: Sequence[Parameter]) -> RewardFunction:
    """Wrap a function of this protocol in a function with TRL's protocol. It passes on these settings."""
    arguments = {
        name: field for name, field in protocol.arguments.items() if name in inspect.signature(function).parameters
    }

    def call(completions: Sequence[Any], **given: Any) -> Any:
        rows = rows_of(completions, {name: given.pop(name, None) for name in READ_COLUMNS})
        if protocol.in_batches:
            lists = {name: [getattr(row, field) for row in rows] for name, field in arguments.items()}
            returned = function(**lists, **given)
        else:
            calls = [{name: getattr(row, field) for name, field in arguments.items()} | given for row in rows]
            returned = [or_fault(functools.partial(function, **each)) for each in calls]
        return with_result(returned, lambda scores: lists_by_name(scores, protocol.reward_key))

    columns = [Parameter("completions", Parameter.POSITIONAL_OR_KEYWORD)]
    columns += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in READ_COLUMNS]
    functools.update_wrapper(call, function)
    call.__signature__ = inspect.Signature([*columns, *settings])  # type: ignore[attr-defined]
    return call


def with_result(returned: Any, then: Callable[[Any], Any]) -> Any:
    """Call `then` on the result of a function. If the function is async, await the result first."""
    if inspect.isawaitable(returned):
        return _then(returned, then)
    if isinstance(returned, list) and any(map(inspect.isawaitable, returned)):
        return _then(_all(returned), then)
    return then(returned)


async def _then(awaitable: Awaitable[Any], then: Callable[[Any], Any]) -> Any:
    return then(await awaitable)


async def _all(values: Sequence[Any]) -> list[Any]:
    """Await all awaitable values concurrently."""
    waiting = [value for value in values if inspect.isawaitable(value)]
    awaited = iter(await asyncio.gather(*waiting))
    return [next(awaited) if inspect.isawaitable(value) else value for value in values]


def rows_of(completions: Sequence[Any], columns: Mapping[str, Sequence[Any] | None]) -> list[Row]:
    """Return the rows of a call. If the data lacks a column, its value is None."""
    rows = []
    for i, completion in enumerate(completions):
        row = {name: None if column is None else column[i] for name, column in columns.items()}
        rows.append(
            Row(
                response=completion_text(completion),
                response_length=len(row["completion_ids"] or ()),
                ground_truth=gold_of(row),
                data_source=row["data_source"],
                extra_info=row["extra_info"] or {},
            )
        )
    return rows


def gold_of(columns: Mapping[str, Any]) -> Any:
    """Return the gold answer in the first of `GOLD_COLUMNS` that has one, or None."""
    return next((gold_value(columns[name]) for name in GOLD_COLUMNS if columns.get(name) is not None), None)


def gold_value(gold: Any) -> Any:
    """Return a gold answer. If it is an object with `ground_truth`, as verl's `reward_model`, return only this
    value."""
    return gold.get("ground_truth", gold) if isinstance(gold, Mapping) else gold


def lists_by_name(scores: Any, reward_key: str) -> Any:
    """Turn one dict per completion into a dict of lists, with scores under `reward`. Return anything else unchanged.

    If a dict has no score, its completion gets a fault. If it lacks another key, the value is None.
    """
    if not isinstance(scores, Sequence) or not any(isinstance(score, Mapping) for score in scores):
        return scores
    dicts = [score if isinstance(score, Mapping) else {reward_key: score} for score in scores]
    names = dict.fromkeys(name for score in dicts for name in score if name not in (reward_key, "reward"))
    rewards = [score[reward_key] if reward_key in score else without_score(score, reward_key) for score in dicts]
    return {"reward": rewards} | {name: [score.get(name) for score in dicts] for name in names}


def without_score(score: Mapping[str, Any], reward_key: str) -> Fault:
    return Fault("type", f"returned a dict without {reward_key!r}, but with {', '.join(map(repr, score)) or 'nothing'}")
