"""The reward table: what every function said, and what is masked."""

import logging
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.registry import PACKAGES
from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.errors import RewardError, refuse_shadow, text_of
from rl_vlm.reward.function import random_states_kept
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import Completion, Group, Prompt, RewardTable, Sample, TrainerState

STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}]


def group(texts: list[str], sample_id: str = "s0", prompt=MESSAGES, **columns) -> Group:
    """A group with these completions of one prompt with an image."""
    sample = Sample(sample_id, MESSAGES, [Image.new("RGB", (3, 2))], columns, prompt)
    completions = [Completion(torch.arange(len(text)), torch.zeros(len(text)), "stop", text) for text in texts]
    return Group(f"g-{sample_id}", Prompt(sample, torch.tensor([1, 2]), {}, {}), completions, policy_version=0)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Makes suites of the functions of a file `mine.py`, and closes them."""
    monkeypatch.chdir(tmp_path)
    suites = []

    def make(source: str, *functions: str | dict, **config) -> RewardSuite:
        Path("mine.py").write_text(source)
        funcs = [f if isinstance(f, str) else RewardSpec(**f) for f in functions or ("mine.py:f",)]
        suites.append(RewardSuite(RewardsConfig(reward_funcs=funcs, **config)))
        return suites[-1]

    yield make
    for made in suites:
        made.close()
    sys.modules.pop(str(tmp_path / "mine.py"), None)


def rounded(table: RewardTable) -> list:
    """Scores as nested lists P, G, F, with None for NaN."""
    return [
        [[None if math.isnan(score) else round(score, 4) for score in scores] for scores in prompt]
        for prompt in table.scores_PGF.tolist()
    ]


def test_every_function_over_every_group(suite):
    rewards = suite(
        "def size(completion_ids): return [len(ids) for ids in completion_ids]", "exact_match", "mine.py:size"
    )
    groups = [group(["7", "77"], solution="7"), group(["1", "<answer>2</answer>"], "s1", solution=None)]
    table = rewards.score(groups, STATE)
    assert rewards.names == table.names == ["exact_match", "size"]
    assert rounded(table) == [[[1.0, 1.0], [0.0, 2.0]], [[None, 1.0], [None, 18.0]]]
    assert table.valid_PG.tolist() == [[True, True], [True, True]]
    assert table.fault_counts == {} and table.fault_messages == {}


def test_what_a_function_is_given(suite):
    source = """
def f(prompts, completions, completion_ids, images, solution, label, scale, trainer_state, log_extra):
    log_extra("given", list(zip(prompts, completions, completion_ids, images, solution, label)))
    return [scale * trainer_state.global_step] * len(prompts)
"""
    rewards = suite(source, {"function": "mine.py:f", "kwargs": {"scale": 2}})
    groups = [group(["ab", "c"], solution=7), group(["d", ""], "s1", prompt="Plain?", label="x")]
    table = rewards.score(groups, STATE)
    images = [g.prompt.sample.images for g in groups]
    assert table.breakdown["given"] == [
        [
            (MESSAGES, [{"role": "assistant", "content": "ab"}], [0, 1], images[0], 7, None),
            (MESSAGES, [{"role": "assistant", "content": "c"}], [0], images[0], 7, None),
        ],
        [("Plain?", "d", [0], images[1], None, "x"), ("Plain?", "", [], images[1], None, "x")],
    ]
    assert rounded(table) == [[[6.0], [6.0]], [[6.0], [6.0]]]


BAD_ELEMENTS = {
    "float('nan')": "nan", "float('inf')": "inf", "float('-inf')": "inf", "1e300": "magnitude", "3e38": "magnitude",
    "'1.0'": "type", "[1.0]": "type", "{}": "type",
}  # fmt: skip


@pytest.mark.parametrize(("element", "kind"), BAD_ELEMENTS.items())
def test_a_bad_element_masks_its_completion(suite, element, kind):
    table = suite(f"def f(completions): return [0.5, {element}, 0.5, None]").score(
        [group(["a", "b"]), group(["c", "d"], "s1")], STATE
    )
    assert rounded(table) == [[[0.5], [None]], [[0.5], [None]]]
    assert table.valid_PG.tolist() == [[True, False], [True, False]]
    assert table.fault_counts == {("f", kind): 1, ("all", "not_applicable"): 1}
    first, second = table.fault_messages.values()
    assert first.startswith(f"f/{kind}: returned ")
    assert first.endswith("; masked completions of samples: s0 [1]")
    assert second == ("all/not_applicable: no reward function applies; masked completions of samples: s1 [1]")


BAD_CALLS = {
    "return None": "none",
    "return [1.0]": "length",
    "return 1.0": "type",
    "return {'a': [1, 1, 1, 1], 'b': [1, 1, 1, 1]}": "type",
    "raise KeyError('gold')": "exception",
}


@pytest.mark.parametrize(("body", "kind"), BAD_CALLS.items())
def test_a_bad_call_masks_all_its_completions_whatever_others_say(suite, body, kind):
    rewards = suite(f"def f(completions): {body}\ndef g(completions): return [1.0] * 4", "mine.py:f", "mine.py:g")
    table = rewards.score([group(["a", "b"]), group(["c", "d"], "s1")], STATE)
    assert rounded(table) == [[[None, 1.0], [None, 1.0]], [[None, 1.0], [None, 1.0]]]
    assert not table.valid_PG.any()
    assert table.fault_counts == {("f", kind): 4}
    (message,) = table.fault_messages.values()
    assert message.startswith(f"f/{kind}: ") and message.endswith(
        "; masked completions of samples: s0 [0, 1], s1 [0, 1]"
    )


def test_a_function_that_applies_to_some_siblings_leaves_the_others_unscored(suite):
    source = "def f(completions): return [1.0, None]\ndef g(completions): return [0.0, 1.0]"
    table = suite(source, "mine.py:f", "mine.py:g").score([group(["a", "b"])], STATE)
    assert rounded(table) == [[[1.0, 0.0], [None, 1.0]]]
    assert table.valid_PG.tolist() == [[True, True]]


def test_sub_scores_and_logs(suite):
    source = """
def box(completions, log_metric, log_extra):
    log_metric("boxes", len(completions))
    log_extra("parsed", [c[0]["content"].upper() for c in completions])
    return {"reward": [0, 1, 2, 3], "iou": [0.1, 0.2, 0.3, 0.4]}
"""
    table = suite(source, "mine.py:box").score([group(["a", "b"]), group(["c", "d"], "s1")], STATE)
    assert rounded(table) == [[[0.0], [1.0]], [[2.0], [3.0]]]
    assert table.breakdown == {"box/iou": [[0.1, 0.2], [0.3, 0.4]], "parsed": [["A", "B"], ["C", "D"]]}
    assert table.metrics == {"boxes": [4.0]}


HANGS = """
import re

def f(completions, images, trainer_state, log_metric):
    if "hang" in completions[1][0]["content"]:
        re.match(r"(a+)+$", "a" * 60 + "b")
    log_metric("width", images[0][0].width)
    return {"reward": [trainer_state.epoch] * len(completions), "size": [len(c) for c in completions]}
"""


@pytest.mark.ci
def test_a_hang_that_holds_the_interpreter_lock_masks_its_group_and_those_behind(suite):
    rewards = suite(HANGS, {"function": "mine.py:f", "timeout": 1.0}, {"function": "exact_match", "timeout": 10})
    texts = {"s0": ["a", "b"], "s1": ["a", "hang"], "s2": ["a", "b"]}
    groups = [group(completions, sample_id, solution="a") for sample_id, completions in texts.items()]
    rewards.score(groups[:1], STATE)
    started = time.monotonic()
    table = rewards.score(groups, STATE)
    assert time.monotonic() - started < 1.0 + 2.0
    assert rounded(table) == [[[0.5, 1.0], [0.5, 0.0]], [[None, 1.0], [None, 0.0]], [[None, 1.0], [None, 0.0]]]
    assert table.valid_PG.tolist() == [[True, True], [False, False], [False, False]]
    assert table.fault_counts == {("f", "timeout"): 4}
    assert list(table.fault_messages.values()) == [
        "f/timeout: took longer than 1 s and was killed; masked completions of samples: s1 [0, 1], s2 [0, 1]"
    ]
    assert table.breakdown == {"f/size": [[1, 1], [None, None], [None, None]]}
    assert table.metrics == {"width": [3.0]}
    assert rewards.score(groups[:1], STATE).valid_PG.all()


def test_functions_with_a_timeout_run_side_by_side(suite):
    source = """
import pathlib, time

def meet(me, other):
    pathlib.Path(me).touch()
    while not pathlib.Path(other).exists():
        time.sleep(0.01)
    return [1.0]

def f(completions): return meet("f", "g")
def g(completions): return meet("g", "f")
"""
    specs = [{"function": f"mine.py:{name}", "timeout": 15} for name in "fg"]
    assert rounded(suite(source, *specs).score([group(["a"])], STATE)) == [[[1.0, 1.0]]]


def test_a_fault_is_logged_once_per_function_and_kind(suite, caplog):
    source = "def f(completions): return [float('nan'), float('inf')]\ndef g(completions): return [float('nan'), 1]"
    rewards = suite(source, "mine.py:f", "mine.py:g")
    with caplog.at_level(logging.WARNING, "rl_vlm.reward"):
        for _ in range(3):
            assert len(rewards.score([group(["a", "b"])], STATE).fault_messages) == 3
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["f/nan", "f/inf", "g/nan"]


def test_messages_are_cut(suite):
    table = suite("def f(completions): raise ValueError('x' * 10_000)").score([group(["a"])], STATE)
    assert [len(message) for message in table.fault_messages.values()] == [300]


def test_no_groups(suite):
    rewards = suite("def f(completions): raise ValueError", "mine.py:f", "exact_match")
    table = rewards.score([], STATE)
    assert table.scores_PGF.shape == (0, 0, 2) and table.valid_PG.shape == (0, 0)
    assert table.fault_counts == {}


def test_names_and_weights(suite):
    source = "def f(completions): return []"
    rewards = suite(source, "format_tags", {"function": "mine.py:f", "name": "mine", "weight": 0.5})
    assert (rewards.names, rewards.weights) == (["format_tags", "mine"], [1.0, 0.5])
    assert suite(source, "format_tags", "mine.py:f", reward_weights=[0.0, 2.0]).weights == [0.0, 2.0]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            ["exact_match", "mine.py:f", "exact_match"],
            "2 reward functions are called 'exact_match': give each a `name`",
        ),
        (["exact_mach"], r"^reward function 'exact_mach': .*did you mean 'exact_match'"),
        (
            [{"function": "format_tags", "kwargs": {"tag": ["think"]}}],
            r"'format_tags' has no argument 'tag' \(did you mean 'tags'\?\); it takes allow_outside, completions, tags",
        ),
    ],
)
def test_what_is_refused(suite, functions, message):
    with pytest.raises(RewardError, match=message):
        suite("def f(completions): return []", *functions)


def test_a_missing_column_is_refused_before_the_run(suite):
    source = "def f(completions, solutions, limit, width=3, **kwargs): return []"
    rewards = suite(source, {"function": "mine.py:f", "kwargs": {"limit": 3}})
    rewards.check_columns(["solutions"])
    with pytest.raises(
        RewardError, match=r"'f' needs a column 'solutions' \(did you mean 'solution'\?\); the data has: a, "
    ):
        rewards.check_columns(["solution", "a"])


def test_missing_columns_of_all_functions_are_refused_at_once(suite):
    source = "def f(completions, gold): return []\ndef g(completions, box): return []"
    rewards = suite(source, {"function": "mine.py:f"}, {"function": "mine.py:g"})
    with pytest.raises(RewardError, match=r"(?s)'f' needs a column 'gold'.*'g' needs a column 'box'"):
        rewards.check_columns(["solution"])


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_a_column_does_not_become_a_setting_of_a_built_in(suite, timeout):
    rewards = suite("", {"function": "format_tags", "timeout": timeout})
    assert rounded(rewards.score([group(["<answer>7</answer>"], tags="digit", allow_outside="")], STATE)) == [[[1.0]]]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("shadow", ["rewards.py", "rewards/__init__.py"])
def test_a_package_that_shadows_ours_is_named_and_not_run(tmp_path, monkeypatch, shadow):
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("raise RuntimeError('this file must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards")
    with pytest.raises(RewardError, match=f"`import rewards` finds {tmp_path / shadow} instead of rl-vlm's own"):
        refuse_shadow()
    assert text_of(ValueError("no\nluck")) == "no luck"
    assert text_of(Unprintable()) == "<exception str() failed>"  # as in a traceback


def test_the_example_of_the_documentation(suite):
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    example = page.split("```python\n# my_reward.py\n")[1].split("```")[0]
    rewards = suite(example, "format_tags", "mine.py:short_answer")
    table = rewards.score([group(["<answer>7</answer>", "<answer>thirty characters</answer>", "x" * 50])], STATE)
    assert rounded(table) == [[[1.0, 1.0], [1.0, 0.1111], [0.0, 0.0]]]
    assert table.metrics == {"characters": [34.0]}


READS_MESSAGES = "def f(completions, **kwargs): return [float(len(c[0]['content'])) for c in completions]"
READS_TEXT = "def f(completions, **kwargs): return [float(len(c.strip())) for c in completions]"
READS_BOTH = "def f(completions): return [1.0] * len(completions)"
FAILS = "def f(completions): raise KeyError('gold')"


@pytest.mark.parametrize(
    ("source", "prompt", "form"),
    [
        (READS_MESSAGES, "Which digit?", "messages"),
        (READS_MESSAGES, MESSAGES, "messages"),
        (READS_TEXT, "Which digit?", "text"),
        (READS_TEXT, MESSAGES, "text"),
        (READS_BOTH, "Which digit?", "text"),
        (READS_BOTH, MESSAGES, "messages"),
        (FAILS, "Which digit?", None),
        (FAILS, MESSAGES, None),
    ],
)
@pytest.mark.parametrize("timeout", [None, pytest.param(20.0, marks=pytest.mark.ci)])
def test_a_function_gets_the_form_that_it_reads(suite, source, prompt, form, timeout):
    rewards = suite(source, {"function": "mine.py:f", "timeout": timeout})
    groups = [group(["ab", "c"], prompt=prompt)]
    forms = rewards.find_forms(lambda _: groups[0].prompt.sample)
    assert forms == [form] == rewards.find_forms(lambda _: groups[0].prompt.sample)
    rewards.use_forms(forms)
    table = rewards.score(groups, STATE)
    assert rounded(table) == (
        [[[None], [None]]] if source == FAILS else [[[1.0 if source == READS_BOTH else 2.0], [1.0]]]
    )


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (READS_TEXT, None),
        (READS_MESSAGES, "; it gets them as messages, which it reads. "),
        (FAILS, "raised KeyError: 'gold' (mine.py:1 in f); it gets them as text nevertheless. "),
    ],
)
def test_the_log_says_if_a_function_cannot_read_the_form_of_the_data(suite, caplog, source, end):
    suite(source).find_forms(lambda _: group(["a"], prompt="Which digit?").prompt.sample)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (0 if end is None else 1)
    for message in found:
        assert message.startswith("reward function 'f' fails on made-up completions as text, the form of the data: ")
        assert end in message


SEEN = "def f(prompts, completions): raise ValueError(repr((prompts, completions)))"


@pytest.mark.parametrize(
    ("form", "prompt", "seen"),
    [
        ("text", MESSAGES, (["Which digit?"], ["ab"])),
        ("text", [{"role": "system", "content": "Be brief."}, *MESSAGES], (["Be brief.\nWhich digit?"], ["ab"])),
        ("messages", "Which?", ([[{"role": "user", "content": "Which?"}]], [[{"role": "assistant", "content": "ab"}]])),
        ("text", "Which?", (["Which?"], ["ab"])),
        ("messages", MESSAGES, ([MESSAGES], [[{"role": "assistant", "content": "ab"}]])),
    ],
)
def test_the_form_that_is_set_is_given_and_not_looked_for(suite, form, prompt, seen):
    rewards = suite(SEEN, {"function": "mine.py:f", "completions": form})
    one = group(["ab"], prompt=prompt)
    assert rewards.find_forms(lambda _: one.prompt.sample) == [form]
    (message,) = rewards.score([one], STATE).fault_messages.values()
    assert repr(seen)[:150] in message


RECORDS = """
import random, numpy, torch
calls = []

def f(completions, log_extra, log_metric, trainer_state, solution, images):
    calls.append(completions)
    random.random(), numpy.random.rand(), torch.rand(1)
    log_extra("parsed", completions)
    log_metric("length", 1.0)
    return [1.0] * len(completions)

def reads_no_completion(completion_ids, solution): raise ValueError("is not called")
"""


def test_looking_for_the_form_calls_once_and_leaves_nothing(suite):
    rewards = suite(RECORDS, "mine.py:f", "mine.py:reads_no_completion", "exact_match")
    states = repr(np.random.get_state()), torch.get_rng_state().tolist()
    sample = group(["a"], prompt="Which?", solution="<answer>3</answer>").prompt.sample
    assert rewards.find_forms(lambda _: sample) == ["text", None, None]
    assert (repr(np.random.get_state()), torch.get_rng_state().tolist()) == states
    (call,) = sys.modules[str(Path("mine.py").resolve())].calls
    assert call == ["<think>This completion is made up.</think>\n<answer>3</answer>"] * 2


def test_random_states_are_kept():
    """Python's own here, from which beartype draws too if anything of ours is called."""
    before = random.getstate()
    with random_states_kept():
        random.random()
    assert random.getstate() == before


def test_a_function_that_hangs_is_not_tried_in_another_form(suite):
    source = (
        "import pathlib, time\ndef f(completions):\n    pathlib.Path(str(time.time_ns())).touch()\n    time.sleep(60)"
    )
    rewards = suite(source, {"function": "mine.py:f", "timeout": 0.5})
    assert rewards.find_forms(lambda _: group(["a"]).prompt.sample) == [None]
    assert len(list(Path().glob("[0-9]*"))) == 1


def test_a_class_is_constructed_once_and_called(suite):
    source = """
class Mine:
    made = 0
    def __init__(self):
        Mine.made += 1
    def __call__(self, completions, solution, scale=1.0):
        return [scale * self.made] * len(completions)
"""
    rewards = suite(source, {"function": "mine.py:Mine", "kwargs": {"scale": 3}})
    groups = [group(["a", "b"], solution="7")]
    assert rewards.names == ["Mine"]
    assert [rounded(rewards.score(groups, STATE)) for _ in range(2)] == [[[[3.0], [3.0]]]] * 2
    with pytest.raises(RewardError, match="'Mine' needs a column 'solution'"):
        rewards.check_columns([])


def test_a_class_with_a_timeout_is_constructed_in_its_worker(suite):
    source = "class Mine:\n    def __call__(self, completions): return [2.0] * len(completions)"
    rewards = suite(source, {"function": "mine.py:Mine", "timeout": 20})
    assert rounded(rewards.score([group(["a"])], STATE)) == [[[2.0]]]


@pytest.mark.parametrize("name", ["step", "prompt", "completion", "reward", "advantage", "row", "data", "all", "a/b"])
def test_names_that_the_run_writes_are_refused(suite, name):
    with pytest.raises(RewardError, match=f"a reward function cannot be called '{name}': .* give it another `name`"):
        suite(READS_BOTH, {"function": "mine.py:f", "name": name})


def test_a_function_that_has_the_name_of_a_column_is_refused(suite):
    with pytest.raises(RewardError, match="a reward function cannot be called 'advantage'"):
        suite("def advantage(completions): return [1.0] * len(completions)", {"function": "mine.py:advantage"})


TAKEN = [
    "log_metric('step', 1)", "log_metric('reward', 1)", "log_metric('loss', 1)", "log_metric('time/step', 1)",
    "log_metric('rewards/f/mean', 1)", "log_metric('eval_reward', 1)", "log_metric('compute/x', 1)",
    "log_extra('step', [1])", "log_extra('reward', [1])", "log_extra('completion', [1])", "log_extra('prompt', [1])",
    "log_extra('data/solution', [1])", "log_extra('f', [1])", "log_extra('g', [1])", "log_extra('g/iou', [1])",
]  # fmt: skip


@pytest.mark.parametrize("logs", TAKEN)
def test_a_call_that_logs_under_a_name_of_the_run_or_of_another_function_is_a_fault(suite, logs):
    source = f"""
def f(completions, log_metric, log_extra):
    log_metric("fine", 1)
    log_extra("parsed", [1])
    {logs}
    return [1.0]

def g(completions): return {{"reward": [0.5], "iou": [0.25]}}
"""
    table = suite(source, "mine.py:f", "mine.py:g").score([group(["a"])], STATE)
    assert table.fault_counts == {("f", "name"): 1}
    assert logs.replace(", 1)", ")").replace(", [1])", ")") in table.fault_messages["f", "name"]
    assert "the run or another function has this name; choose another" in table.fault_messages["f", "name"]
    assert (table.breakdown, table.metrics) == ({"g/iou": [[0.25]]}, {})


def test_of_two_functions_with_one_column_the_second_is_a_fault_and_metrics_may_be_shared(suite):
    source = """
def f(completions, log_extra, log_metric): log_extra("parsed", ["f"]); log_metric("length", 1); return [1.0]
def g(completions, log_extra, log_metric): log_extra("parsed", ["g"]); log_metric("length", 2); return [1.0]
def h(completions, log_metric): log_metric("length", 3); return [1.0]
"""
    table = suite(source, "mine.py:f", "mine.py:g", "mine.py:h").score([group(["a"])], STATE)
    assert table.fault_counts == {("g", "name"): 1}
    assert (table.breakdown, table.metrics) == ({"parsed": [["f"]]}, {"length": [1.0, 3.0]})


CHANGES_DIRECTORY = """
import os

def f(completions):
    os.chdir("/")
    return [1.0]

async def g(completions):
    os.chdir("/")
    return [1.0]

def h(completions):
    os.chdir("/")
    raise ValueError
"""


@pytest.mark.parametrize("function", "fgh")
def test_a_function_that_changes_the_working_directory_changes_it_for_nobody_else(suite, function, tmp_path):
    rewards = suite(CHANGES_DIRECTORY, f"mine.py:{function}")
    rewards.score([group(["a"])], STATE)
    assert Path.cwd() == tmp_path


def test_a_function_runs_in_the_working_directory_whatever_the_one_before_it_did(suite, tmp_path):
    where = "def where(completions, log_extra): log_extra('seen', [os.getcwd()]); return [1.0]"
    table = suite(f"{CHANGES_DIRECTORY}\n{where}", "mine.py:f", "mine.py:where").score([group(["a"])], STATE)
    assert table.breakdown == {"seen": [[str(tmp_path)]]}


def test_a_file_that_changes_the_working_directory_changes_it_for_nobody_else(suite, tmp_path):
    suite("import os; os.chdir('/')\ndef f(completions): return []")
    assert Path.cwd() == tmp_path


def test_the_place_of_a_long_exception_is_shown(suite):
    table = suite("def f(completions): raise ValueError('x' * 10_000)").score([group(["a"])], STATE)
    assert table.fault_messages["f", "exception"].startswith(
        f"f/exception: raised ValueError: {'x' * 220}… (mine.py:1 in f)"
    )


def test_groups_without_a_column_of_the_data_give_none(suite):
    rewards = suite("def f(completions, gold): return [0.0 if g is None else float(g) for g in gold]", "mine.py:f")
    rewards.check_columns(["gold"])
    assert rounded(rewards.score([group(["a", "b"])], STATE)) == [[[0.0], [0.0]]]
    assert rounded(rewards.score([group(["a", "b"], gold="3")], STATE)) == [[[3.0], [3.0]]]


FAILS_ONCE = """
calls = []
def f(completions):
    calls.append(completions)
    if len(calls) == 1:
        raise ConnectionError("judge not reachable")
    return [1.0] * len(completions)
"""


def test_a_function_that_fails_once_keeps_the_form_of_the_data(suite):
    sample = group(["a"], prompt="Which digit?").prompt.sample
    assert suite(FAILS_ONCE, "mine.py:f").find_forms(lambda _: sample) == [None]


def test_a_function_without_a_signature_is_refused(suite):
    with pytest.raises(RewardError, match="'builtins:max' cannot be called by name"):
        suite("", "builtins:max")


def test_a_function_scores_the_rows_that_it_applies_to(suite):
    source = """
def f(completions, log_extra):
    log_extra("seen", completions)
    return {"reward": [1.0] * len(completions), "part": [ord(text) for text in completions]}
"""
    rewards = suite(source, {"function": "mine.py:f", "applies_to": {"data_source": ["geo", "clevr"]}}, "exact_match")
    rows = [("geo", "a"), ("ocr", "b"), ("clevr", "c")]
    groups = [group([text] * 2, text, prompt="Which?", data_source=source, solution=text) for source, text in rows]
    table = rewards.score(groups, STATE)
    assert rounded(table) == [[[1.0, 1.0]] * 2, [[None, 1.0]] * 2, [[1.0, 1.0]] * 2]
    assert table.breakdown["seen"] == [["a", "a"], [None, None], ["c", "c"]]
    assert table.breakdown["f/part"] == [[97, 97], [None, None], [99, 99]]
    assert rounded(rewards.score(groups[1:2], STATE)) == [[[None, 1.0]] * 2], "it is not called at all"
    rewards.check_columns(["data_source", "solution"])
    with pytest.raises(
        RewardError, match=r"applies_to: data_source, but the data has no such column \(did you mean 'dat"
    ):
        rewards.check_columns(["data_sources", "solution"])


def test_the_form_is_found_on_a_row_that_the_function_applies_to(suite):
    source = "def f(completions, solution):\n    return [float(len(s)) for s in solution]"
    rewards = suite(source, {"function": "mine.py:f", "applies_to": {"task": "b"}})
    samples = {task: group(["x"], task=task, solution=gold).prompt.sample for task, gold in (("a", 3), ("b", "c"))}
    tested = []

    def example(applies):
        tested.append([task for task, sample in samples.items() if applies(sample.columns)])
        return samples["b"]

    assert rewards.find_forms(example) == ["messages"]
    assert tested == [["b"]]


@pytest.mark.parametrize(("calls", "sizes"), [("window", [6]), ("group", [2, 2, 2])])
def test_a_function_sees_a_window_or_one_group(suite, calls, sizes):
    source = """
SIZES = []
def f(completions):
    SIZES.append(len(completions))
    return [float(len(SIZES))] * len(completions)
"""
    rewards = suite(source, {"function": "mine.py:f", "calls": calls})
    table = rewards.score([group(["a", "b"], str(i)) for i in range(3)], STATE)
    assert sizes == sys.modules[str(Path("mine.py").resolve())].SIZES
    assert [scores[0][0] for scores in rounded(table)] == ([1.0] * 3 if calls == "window" else [1.0, 2.0, 3.0])


def test_functions_are_given_the_sizes_of_images(suite):
    source = """
def f(completions, image_sizes, model_image_sizes, log_extra):
    log_extra("a", image_sizes)
    log_extra("b", model_image_sizes)
    return [1.0]
"""
    one = group(["x"])
    resized = Group("g", replace(one.prompt, image_sizes=[(28, 56)]), one.completions, 0)
    assert suite(source).score([resized], STATE).breakdown == {"a": [[[(3, 2)]]], "b": [[[(28, 56)]]]}


@pytest.mark.parametrize(("name", "package"), [("trl.rewards:think_format_reward", "trl"), ("numeric", "nowhere")])
def test_a_missing_extra_is_named(name, package, monkeypatch):
    monkeypatch.setattr("rl_vlm.reward.function.find_spec", lambda asked: None if asked == package else asked)
    monkeypatch.setitem(PACKAGES, "numeric", ("nowhere",))
    extra = "trl" if package == "trl" else "rewards"
    with pytest.raises(RewardError, match=rf"pip install -e '\.\[{extra}\]'"):
        RewardSuite(RewardsConfig(reward_funcs=[name]))


def test_functions_of_trl_go_by_their_name():
    from trl.rewards.format_rewards import think_format_reward

    text = "<think>\nIt is a seven.\n</think>\nSeven"
    with RewardSuite(RewardsConfig(reward_funcs=["trl.rewards:think_format_reward"])) as rewards:
        table = rewards.score([group([text, "Seven"])], STATE)
    messages = [[{"role": "assistant", "content": content}] for content in (text, "Seven")]
    assert [score[0] for score in rounded(table)[0]] == think_format_reward(messages) == [1.0, 0.0]
