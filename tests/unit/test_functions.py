"""Users' functions by name, and what is said of names that do not work."""

import importlib.metadata
import sys
from functools import partial

import pytest

import rewards
from rewards.answers.exact_match import exact_match
from rewards.registry import BUILT_INS
from rl_vlm import functions
from rl_vlm.functions import LoadError

load_function = partial(functions.load_function, built_ins=BUILT_INS, group="rl_vlm.rewards")

SOURCE = """
from neighbour import LIMIT

def short_answer(completions, **kwargs):
    return [float(len(c) < LIMIT) for c in completions]

THRESHOLD = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with a reward file and a module that it imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)  # of another test's folder
    (tmp_path / "my_reward.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("LIMIT = 5")
    yield tmp_path
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_built_in():
    assert load_function("exact_match") is exact_match


@pytest.mark.parametrize("name", ["my_reward.py:short_answer", "./my_reward.py:short_answer", "my_reward:short_answer"])
def test_file_and_module_from_the_working_directory(name, folder):
    path_before = list(sys.path)
    assert load_function(name)(["seven", "7"]) == [0.0, 1.0]
    assert sys.path == [*path_before, str(folder)]


def test_a_file_elsewhere_imports_from_its_own_folder_and_from_the_working_directory(folder):
    (folder / "src").mkdir()
    (folder / "src" / "beside.py").write_text("ONE = 1.0")
    (folder / "src" / "mine.py").write_text(
        "from beside import ONE\nfrom neighbour import LIMIT\n"
        "def late(completions):\n    import neighbour\n    return [ONE + neighbour.LIMIT]"
    )
    assert load_function("src/mine.py:late")([""]) == [6.0]
    assert str(folder / "src") not in sys.path


def test_functions_of_one_file_share_its_module():
    first, second = (load_function("my_reward.py:short_answer") for _ in range(2))
    assert first is second


def test_a_file_called_rewards_is_fine(folder):
    (folder / "rewards.py").write_text("def mine(completions): return [1.0]")
    assert load_function("rewards.py:mine")([""]) == [1.0]
    assert sys.modules["rewards"] is rewards


def test_dataclasses_in_a_reward_file_work(folder):
    (folder / "typed.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Limit:\n    n: int\ndef f(completions): return [float(Limit(3).n)]"
    )
    assert load_function("typed.py:f")([""]) == [3.0]


def test_entry_point(monkeypatch):
    plugin = importlib.metadata.EntryPoint("brevity", "my_reward:short_answer", "rl_vlm.rewards")
    monkeypatch.setattr("rl_vlm.functions.entry_points", lambda group: {"rl_vlm.rewards": [plugin]}[group])
    monkeypatch.syspath_prepend(".")
    assert load_function("brevity")(["7"]) == [1.0]
    with pytest.raises(LoadError, match=r"did you mean 'brevity'\?.*points of the group rl_vlm\.rewards: brevity;"):
        load_function("brevty")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", r"called 'exact_mach' \(did you mean 'exact_match'\?\); built-in: .*choice.*, exact_match, "),
        ("my_reward.py", r"name your own function as `file\.py:function` or `module:function`"),
        ("my_reward.py:short_anser", r"my_reward\.py has no function 'short_anser' \(did you mean 'short_answer'\?\)"),
        ("my_reward.py:nothing", r"my_reward\.py has no function 'nothing'; it defines: short_answer$"),
        ("my_reward.py:THRESHOLD", r"my_reward\.py has a int, not a function, called 'THRESHOLD'"),
        ("my_rewards.py:f", r"no file .*my_rewards\.py \(did you mean 'my_reward\.py'\?\); Python files there: brok"),
        ("no_module:f", r"module 'no_module' cannot be imported from .*: ModuleNotFoundError: No module named 'no_m"),
        ("broken.py:f", r"broken\.py cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_errors_say_what_exists(name, message, folder):
    (folder / "broken.py").write_text("1 / 0")
    with pytest.raises(LoadError, match=message):
        load_function(name)


CLASSES = """
class Mine:
    def __call__(self, completions): return [1.0]

class Scaled(Mine):
    def __init__(self, scale, *more, bias=0.0): ...

class Broken(Mine):
    def __init__(self): raise OSError("no model")

class Unprintable(Mine):
    def __init__(self):
        class Unprintable(Exception):
            def __str__(self): raise RuntimeError
        raise Unprintable

class Leaves(Mine):
    def __init__(self): raise SystemExit(3)

class Panics(Mine):
    def __init__(self): raise BaseException("\\x1b[31mof\\nRust")

class Data: ...

def function(completions): return [2.0]
instance = Scaled(3)
"""


def test_a_class_is_constructed_and_anything_else_is_as_it_was(folder):
    (folder / "classes.py").write_text(CLASSES)
    calls = {"Mine": [1.0], "function": [2.0], "instance": [1.0]}
    assert {name: functions.load_callable(f"classes.py:{name}")([""]) for name in calls} == calls


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Scaled", r"'Scaled' is constructed without arguments, but needs scale; .* `my_function = Scaled\(…\)`"),
        ("Broken", "'Broken' cannot be constructed: OSError: no model"),
        ("Unprintable", r"'Unprintable' cannot be constructed: Unprintable: <exception str\(\) failed>"),
        ("Leaves", "'Leaves' cannot be constructed: SystemExit: 3"),
        ("Panics", "'Panics' cannot be constructed: BaseException: of Rust$"),
        ("Data", "the class 'Data' has no method `__call__`"),
    ],
)
def test_classes_that_cannot_be_functions(folder, name, message):
    (folder / "classes.py").write_text(CLASSES)
    with pytest.raises(LoadError, match=message):
        functions.load_callable(f"classes.py:{name}")


def test_a_file_that_exits_is_refused(folder):
    (folder / "exits.py").write_text("raise SystemExit(0)")
    with pytest.raises(LoadError, match="cannot be imported: SystemExit: 0"):
        load_function("exits.py:f")
