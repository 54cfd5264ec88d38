"""One call: arguments, logs, exceptions, async functions."""

import asyncio
import sys

import pytest

from rewards.calling import Call, describe, select_arguments
from rewards.contract import Answer, Fault


def test_a_function_gets_what_it_declares():
    offered = {"prompts": [1], "completions": [2], "solution": [3]}
    assert select_arguments(lambda completions, solution=None: 0, offered) == {"completions": [2], "solution": [3]}
    assert select_arguments(lambda *, completions: 0, offered) == {"completions": [2]}
    assert select_arguments(lambda completions, label=None: 0, offered) == {"completions": [2]}
    assert select_arguments(lambda completions, **kwargs: 0, offered) == offered


def test_logs_travel_with_the_answer():
    def function(completions, log_extra, log_metric):
        log_extra("length", [len(c) for c in completions])
        log_metric("mean", 1)
        log_metric("mean", 2)
        return [0.0, 1.0]

    answer = Call(function, {"completions": ["a", "bb"]}, 2).answer()
    assert answer == Answer([0.0, 1.0], extras={"length": [1, 2]}, metrics={"mean": [1.0, 2.0]})


def test_an_extra_column_of_the_wrong_length_is_refused():
    def function(completions, log_extra):
        log_extra("length", [1])

    (fault, _) = Call(function, {"completions": ["a", "bb"]}, 2).answer().scores
    assert isinstance(fault, Fault) and "log_extra('length') got 1 values for 2 completions" in fault.message


async def raises_later(completions):
    await asyncio.sleep(0)
    raise ValueError("no luck")


def raises(completions):
    raise ValueError("no luck")


@pytest.mark.parametrize("function", [raises, raises_later])
def test_an_exception_is_a_fault_that_names_the_line(function):
    scores = Call(function, {"completions": ["a", "b"]}, 2).answer().scores
    line = function.__code__.co_firstlineno + (1 if function is raises else 2)
    message = f"raised ValueError: no luck (test_rewards_calling.py:{line} in {function.__name__})"
    assert scores == [Fault("exception", message)] * 2


async def exits_later(completions):
    await asyncio.sleep(0)
    sys.exit(3)


def exits(completions):
    sys.exit(3)


@pytest.mark.parametrize(("function", "raised"), [(exits, "SystemExit: 3"), (exits_later, "RuntimeError: sys.exit(3)")])
def test_sys_exit_is_a_fault_and_ends_nothing(function, raised):
    (fault,) = Call(function, {"completions": ["a"]}, 1).answer().scores
    line = function.__code__.co_firstlineno + (1 if function is exits else 2)
    message = f"raised {raised} (test_rewards_calling.py:{line} in {function.__name__})"
    assert fault == Fault("exception", message)
    (fault,) = Call(raises_later, {"completions": ["a"]}, 1).answer().scores
    assert isinstance(fault, Fault) and "ValueError" in fault.message


def test_a_missing_argument_is_a_fault():
    (fault,) = Call(lambda completions, solution: [1.0], {"completions": ["a"]}, 1).answer().scores
    assert isinstance(fault, Fault) and "missing 1 required positional argument: 'solution'" in fault.message


def test_async_functions_run_side_by_side():
    met = asyncio.Event()

    async def waits(completions):
        await asyncio.wait_for(met.wait(), timeout=10)
        return [1.0]

    async def lets_go(completions):
        met.set()
        return [2.0]

    calls = [Call(function, {"completions": ["a"]}, 1) for function in (waits, lets_go)]
    assert [call.answer().scores for call in calls] == [[1.0], [2.0]]


def test_async_functions_keep_their_event_loop():
    loops = []

    async def function(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    for _ in range(2):
        Call(function, {"completions": ["a"]}, 1).answer()
    assert loops[0] is loops[1]


def test_a_running_event_loop_is_no_obstacle():
    async def function(completions):
        return [1.0]

    async def notebook_cell():
        return Call(function, {"completions": ["a"]}, 1).answer().scores

    assert asyncio.run(notebook_cell()) == [1.0]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_a_fault():
    def function(completions):
        raise Unprintable

    (fault,) = Call(function, {"completions": ["a"]}, 1).answer().scores
    line = function.__code__.co_firstlineno + 1
    place = f"(test_rewards_calling.py:{line} in function)"
    assert fault == Fault("exception", f"raised Unprintable: <exception str() failed> {place}")


def test_an_exception_without_a_place_is_described():
    assert describe(ValueError("no luck")) == "ValueError: no luck"
