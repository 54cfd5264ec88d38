"""Names of objects in memory, and the contents that they are recorded by."""

import functools
import linecache
import os
import subprocess
import sys
from typing import Any

import pytest

from rl_vlm.config.function_names import live_name, names_function
from rl_vlm.functions import LoadError, content_of, label_of, live, load_function


def test_a_name_has_the_first_digits_of_the_sha256():
    assert live_name("<lambda>", "lambda: 1") == "python:<lambda>#a2c701d9f9dd"  # as sha256sum prints them


def test_objects_are_loaded_within_the_block_alone():
    name = live_name("length", "source")
    assert names_function(name)
    with live({name: len}):
        assert load_function(name) is len
        with live({name: max}):
            assert load_function(name) is max
        assert load_function(name) is len
    in_memory = r"^python:length#\w{12} was an object in the memory of a Python session .*run the Python code again"
    with pytest.raises(LoadError, match=in_memory):
        load_function(name)


def limit(most: int, note: Any = None) -> Any:
    def below(completions: list[str], *, scale: float = 1.0) -> list[float]:
        return [scale * (len(text) < most) for text in completions if note is not text]

    return below


def scaled(function: Any, factor: float) -> Any:
    @functools.wraps(function)
    def other(*args: Any) -> Any:
        return [factor * score for score in function(*args)]

    return other


class Constant:
    """A callable."""

    score = 1.0

    def __init__(self, times: Any = 1) -> None:
        self.times = times

    def __call__(self, completions: list[str]) -> list[float]:
        return [self.score * self.times for _ in completions]


class Double(Constant):
    score = 2.0


def test_equal_functions_have_equal_contents():
    for made in (
        lambda: limit(3),
        lambda: limit(3, note=object()),  # of which the class counts
        lambda: scaled(limit(3), 2.0),
        lambda: Constant(2),
        lambda: Constant(2).__call__,
        lambda: functools.partial(limit(3), scale=object()),
        lambda: functools.lru_cache(limit(3)),
        lambda: eval("lambda c: [t for t in c if t in {'a', 'b'}]"),
    ):
        assert content_of(made()) == content_of(made())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (limit(3), limit(4)),
        (limit(3), scaled(limit(3), 2.0)),
        (scaled(limit(3), 2.0), scaled(limit(3), 5.0)),
        (scaled(limit(3), 2.0), scaled(limit(4), 2.0)),
        (limit(3, note=[1]), limit(3, note=[2])),
        (Constant(), Double()),
        (Constant(1), Constant(2)),
        (Constant(1).__call__, Constant(2).__call__),
        (functools.partial(limit(3), scale=1.0), functools.partial(limit(3), scale=2.0)),
        (functools.partial(limit(3), scale=1.0), functools.partial(limit(4), scale=1.0)),
        (functools.partial(sum, start=list(range(5000))), functools.partial(sum, start=[0, *range(1, 4999), 0])),
        (functools.lru_cache(limit(3)), functools.lru_cache(limit(4))),
        (len, max),
        (type("Env", (dict,), {"x": 1}), type("Env", (dict,), {"x": 2})),  # with methods that C defines
        (eval("lambda c, a=1: c"), eval("lambda c, a=2: c")),
        (eval("lambda c, *, t=1: c"), eval("lambda c, *, t=2: c")),
        (eval("lambda c: 1"), eval("lambda c: 2")),
        (eval("lambda c: c.lower()"), eval("lambda c: c.upper()")),
    ],
)  # fmt: skip
def test_other_functions_have_other_contents(one: Any, other: Any):
    assert content_of(one) != content_of(other)


def test_classes_without_a_source_file():
    contents, method = [], "@staticmethod\n def h(): return 3"
    for line in ("x = 1", "x = 2", "def h(s): return 1", "def h(s): return 2", method, method.replace("3", "4")):
        names: dict[str, Any] = {"__name__": "made"}
        exec(f"class Sum:\n {line}\n def __call__(self, c): return c", names)
        contents.append(content_of(names["Sum"]()))
    assert len(set(contents)) == 6


def test_a_file_that_is_edited_and_not_imported_again_has_the_function_that_runs(tmp_path, monkeypatch):
    path = tmp_path / "edited_rewards.py"
    path.write_text("def f(c):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import edited_rewards  # pyright: ignore[reportMissingImports]

    before = content_of(edited_rewards.f)
    path.write_text("# longer\n\ndef f(c):\n    return 2.0\n")
    linecache.checkcache()
    assert content_of(edited_rewards.f) == before


def test_a_function_that_refers_to_itself():
    def recursive(count: int) -> int:
        return recursive(count - 1) if count else 0

    assert "recursive" in content_of(recursive)


def test_labels():
    assert label_of(functools.partial(functools.partial(limit), 3)) == "limit"
    assert label_of(Constant()) == "Constant" and label_of(lambda: 0) == "<lambda>"


PROGRAM = """
from rl_vlm.functions import content_of
class Sum:
    words = {'a', 'b', 'c', 'd', 'e'}
    def __call__(self, c): return [t for t in c if t in {'a', 'b', 'c', 'd', 'e'}]
print(content_of(Sum()))
"""


def content_in_another_process(seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_two_processes_find_the_same_content():
    found = content_in_another_process("1")
    assert found.startswith("__main__.Sum ") and "'c'" in found
    assert found == content_in_another_process("2")
