"""One call: arguments, logs, exceptions, async functions."""

import asyncio

import pytest

from rewards.calling import Call, describe, select_arguments
from rewards.contract import Answer, Fault, text_of
from rl_vlm import errors


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
    message = f"raised ValueError: no luck (test_calling.py:{line} in {function.__name__})"
    assert scores == [Fault("exception", message)] * 2


class Panic(BaseException):
    """As those of Rust's libraries, and FunctionTimedOut of func_timeout."""


NO_EXCEPTIONS = [Panic("lost"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
"""Errors that do not derive from Exception."""


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=repr)
@pytest.mark.parametrize("how", ["sync", "async", "in a task of its own"])
def test_what_is_no_exception_is_a_fault_and_ends_nothing(how, error):
    met = asyncio.Event()

    def function(completions):
        raise error

    async def later(completions):
        await asyncio.sleep(0)
        function(completions)

    async def in_a_task(completions):
        await asyncio.gather(asyncio.create_task(later(completions)))

    async def waits(completions):
        await asyncio.wait_for(met.wait(), timeout=10)
        return [1.0]

    async def lets_go(completions):
        met.set()
        return [2.0]

    called = {"sync": function, "async": later, "in a task of its own": in_a_task}[how]
    calls = [Call(one, {"completions": ["a"]}, 1) for one in (waits, called, lets_go)]
    for call in calls:
        call.returned.result(timeout=10)
    ((waited,), (fault,), (let_go,)) = (call.answer().scores for call in calls)
    assert (waited, let_go) == (1.0, 2.0)
    assert isinstance(fault, Fault) and fault.kind == "exception"
    assert fault.message.startswith(f"raised {type(error).__name__}: {error}".rstrip())
    if how != "in a task of its own":
        assert f"test_calling.py:{function.__code__.co_firstlineno + 1} in function" in fault.message


class EndsOnLooking:
    """Raises what is no Exception when its elements are read."""

    def tolist(self):
        raise Panic("lost")

    ndim, item = 0, tolist


def test_what_an_objects_methods_raise_is_a_fault_of_what_they_concern():
    (fault,) = Call(lambda: EndsOnLooking(), {}, 1).answer().scores
    assert isinstance(fault, Fault) and fault.kind == "exception"
    first, second = Call(lambda: [1.0, EndsOnLooking()], {}, 2).answer().scores
    assert first == 1.0 and second == Fault("type", "returned a EndsOnLooking that cannot be read: Panic")


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
    place = f"(test_calling.py:{line} in function)"
    assert fault == Fault("exception", f"raised Unprintable: <exception str() failed> {place}")


def test_an_exception_without_a_place_is_described():
    assert describe(ValueError("no luck")) == "ValueError: no luck"


ESCAPES = (
    "\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x9b1m\r\nsecond\x08\u2028third\u202e\ttab\x00"
)


@pytest.mark.parametrize("text", [text_of, errors.text_of, lambda error: describe(error).removeprefix("ValueError: ")])
def test_the_text_of_an_exception_is_one_line_without_escape_sequences(text):
    assert text(ValueError(ESCAPES)) == "red link 1m second third tab"
    assert text(ValueError("größer als 3 × 4 🙂")) == "größer als 3 × 4 🙂"
