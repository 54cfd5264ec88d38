"""Amounts that requests share."""

import threading

import pytest

from rl_vlm.tools.serving.budget import Budget, NotInTime


def test_units_come_back_after_an_error():
    budget = Budget(5)
    with pytest.raises(ValueError), budget.held(5, 0.0):
        assert budget.left == 0
        raise ValueError
    assert budget.left == 5


def test_what_is_not_left_is_refused_in_time():
    budget = Budget(5)
    with budget.held(3, 0.0), pytest.raises(NotInTime), budget.held(3, 0.05):
        pass
    assert budget.left == 5


def test_what_is_given_back_goes_to_who_waits():
    budget = Budget(5)
    assert budget.take(3, 0.0)
    threading.Timer(0.1, budget.give, [3]).start()
    assert budget.take(5, 5.0)


def test_threads_never_hold_more_than_there_is():
    budget, held, most = Budget(10), [0], [0]

    def work(amount: int) -> None:
        for _ in range(50):
            with budget.held(amount, 20.0):
                held[0] += amount
                most[0] = max(most[0], held[0])
                held[0] -= amount

    threads = [threading.Thread(target=work, args=[amount]) for amount in (1, 2, 3, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0] <= 10, budget.left) == (True, 10)
