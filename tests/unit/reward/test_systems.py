"""Reward functions in the styles of five systems load unchanged, and score as when they are called by hand.

Each is written as users of that system write it, with its imports, its names and its quirks.
"""

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rewards.adapters import rows_of
from rewards.stand_ins import stand_ins
from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.errors import RewardError
from rl_vlm.reward.function import Reward
from rl_vlm.reward.golds import why_not_scored
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import FaultKey, TrainerState
from tests.unit.reward.test_suite import group, rounded

pytestmark = pytest.mark.ci

TEXTS = ["<think>3 + 4</think><answer>7</answer>", "<answer>8</answer>", "seven", ""]
CHAT = [[{"role": "assistant", "content": text}] for text in TEXTS]
STATE = TrainerState(global_step=3, max_steps=10, epoch=0.5)


@dataclass
class Style:
    """One function: its source, the row that its system gives, and how it would call the function."""

    system: str
    source: str
    by_hand: Callable[[Any], list[Any]]
    """Takes the function and returns one score per text of `TEXTS`."""
    columns: dict[str, Any] = field(default_factory=lambda: {"solution": "7"})
    name: str = "f"
    sub_scores: tuple[str, ...] = ()


def repeated(**columns: Any) -> dict[str, list[Any]]:
    return {name: [value] * len(TEXTS) for name, value in columns.items()}


def easyr1_inputs(gold: str) -> list[dict[str, Any]]:
    return [{"response": text, "response_length": len(text), "ground_truth": gold} for text in TEXTS]


def verl_scores(function: Any, gold: str, info: dict[str, Any]) -> list[Any]:
    scores = [function(data_source="geo", solution_str=t, ground_truth=gold, extra_info=info) for t in TEXTS]
    return [score["score"] if isinstance(score, dict) else score for score in scores]


STYLES = {
    "trl, conversational": Style(
        "TRL",
        """
import re
def f(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
""",
        lambda f: f(completions=CHAT),
    ),
    "trl, None for rows of another task": Style(
        "TRL",
        """
def f(prompts, completions, completion_ids, task, solution, log_extra=None, log_metric=None, **kwargs):
    if log_metric:
        log_metric("seen", len(completions))
    return [float(s in c[0]["content"]) if t == "math" else None for c, t, s in zip(completions, task, solution)]
""",
        lambda f: f(prompts=[], completions=CHAT, completion_ids=[], **repeated(task="math", solution="7")),
        {"solution": "7", "task": "math"},
    ),
    "trl, async": Style(
        "TRL",
        """
import asyncio
async def f(prompts, completions, trainer_state=None, **kwargs):
    await asyncio.sleep(0)
    return [len(c[0]["content"]) / 10 for c in completions]
""",
        lambda f: asyncio.run(f(prompts=[], completions=CHAT)),
    ),
    "vlm-r1, accuracy": Style(
        "VLM-R1",
        """
import os, re
from datetime import datetime
def f(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    current_time = datetime.now().strftime("%d-%H-%M-%S-%f")
    for content, sol in zip(contents, solution):
        reward = 0.0
        try:
            sol_match = re.search(r'<answer>(.*?)</answer>', sol)
            ground_truth = sol_match.group(1).strip() if sol_match else sol.strip()
            content_match = re.search(r'<answer>(.*?)</answer>', content)
            student_answer = content_match.group(1).strip() if content_match else content.strip()
            if student_answer == ground_truth:
                reward = 1.0
        except Exception:
            pass
        rewards.append(reward)
        if os.getenv("DEBUG_MODE") == "true":
            log_path = os.getenv("LOG_PATH")
            with open(log_path, "a") as f:
                f.write(f"{current_time} {kwargs.get('image_path')[0]}")
    return rewards
""",
        lambda f: f(completions=CHAT, **repeated(solution="<answer> 7 </answer>")),
        {"solution": "<answer> 7 </answer>"},
    ),
    "vlm-r1, static method": Style(
        "VLM-R1",
        """
class Qwen2VLModule:
    @staticmethod
    def format_reward_rec(completions, **kwargs):
        import re
        pattern = r"<think>.*?</think>\\s*<answer>.*?</answer>"
        completion_contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.search(pattern, c, re.DOTALL) is not None else 0.0 for c in completion_contents]
f = Qwen2VLModule.format_reward_rec
""",
        lambda f: f(completions=CHAT),
    ),
    "easyr1, batch": Style(
        "EasyR1",
        """
import re
from typing import Any
REWARD_NAME = "math"
REWARD_TYPE = "batch"
def format_reward(response: str) -> float:
    return 1.0 if re.fullmatch(re.compile(r"<think>.*</think>.*<answer>.*</answer>.*", re.DOTALL), response) else 0.0
def accuracy_reward(response: str, ground_truth: str) -> float:
    found = re.search(r"<answer>(.*?)</answer>", response)
    return 1.0 if found and found.group(1) == ground_truth else 0.0
def f(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    if not isinstance(reward_inputs, list):
        raise ValueError("Please use `reward_type=batch` for math reward function.")
    scores = []
    for reward_input in reward_inputs:
        response = re.sub(r"\\s*(<|>|/)\\s*", r"\\1", reward_input["response"])
        format_score = format_reward(response)
        accuracy_score = accuracy_reward(response, reward_input["ground_truth"])
        scores.append({
            "overall": (1 - format_weight) * accuracy_score + format_weight * format_score,
            "format": format_score, "accuracy": accuracy_score,
        })
    return scores
""",
        lambda f: [score["overall"] for score in f(easyr1_inputs("7"))],
        sub_scores=("format", "accuracy"),
    ),
    "easyr1, sequential": Style(
        "EasyR1",
        """
REWARD_TYPE = "sequential"
def f(reward_input):
    if not isinstance(reward_input, dict):
        raise ValueError("Please use `reward_type=sequential`.")
    right = float(reward_input["ground_truth"] in reward_input["response"])
    return {"overall": right - 0.001 * reward_input["response_length"], "accuracy": right}
""",
        lambda f: [f(one)["overall"] for one in easyr1_inputs("7")],
        {"answer": "7"},
        sub_scores=("accuracy",),
    ),
    "easyr1, older": Style(
        "EasyR1",
        """
def f(predict_str: str, ground_truth: str) -> dict:
    return {"overall": float(ground_truth in predict_str), "accuracy": 0.5}
""",
        lambda f: [f(text, "7")["overall"] for text in TEXTS],
        sub_scores=("accuracy",),
    ),
    "ms-swift, ORM": Style(
        "ms-swift",
        """
import re
from typing import List
from swift.plugin import ORM, orms
from swift.utils import get_logger
logger = get_logger()
class MathORM(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        rewards = []
        for content, sol in zip(completions, solution):
            found = re.search(r"<answer>(.*?)</answer>", content)
            rewards.append(1.0 if found and found.group(1).strip() == sol else 0.0)
        return rewards
orms["external_math"] = MathORM
""",
        lambda f: f(TEXTS, **repeated(solution="7")),
        name="MathORM",
    ),
    "ms-swift, by its registered name, with imports of more than rewards": Style(
        "ms-swift",
        """
from swift.llm import PtEngine, RequestConfig
from swift.llm.infer.protocol import ChatCompletionResponse
from swift.plugin import ORM, orms, rm_plugins
from swift.plugin.rm_plugin import DefaultRMPlugin
class LengthORM(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(c)) for c in completions]
class Judge(DefaultRMPlugin):
    def __init__(self):
        self.engine = PtEngine("model")
orms["external_length"] = LengthORM
rm_plugins["judge"] = Judge
""",
        lambda f: f(TEXTS),
        name="external_length",
    ),
    "ms-swift, with state": Style(
        "ms-swift",
        """
from swift.rewards import ORM, orms
class CosineReward(ORM):
    def __init__(self, args=None, cosine_max_len: int = 20):
        super().__init__(args)
        self.cosine_max_len = cosine_max_len
        self.calls = 0
    def __call__(self, completions, **kwargs):
        self.calls += 1
        return [min(1.0, len(c) / self.cosine_max_len) for c in completions]
orms['cosine'] = CosineReward
""",
        lambda f: f(TEXTS),
        name="CosineReward",
    ),
    "ms-swift, async": Style(
        "ms-swift",
        """
import asyncio
from swift.rewards.orm import AsyncORM
class Slow(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return list(await asyncio.gather(*(self.one(c) for c in completions)))
    async def one(self, completion):
        return float("7" in completion)
""",
        lambda f: asyncio.run(f(TEXTS)),
        name="Slow",
    ),
    "verl, number": Style(
        "verl",
        """
def f(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "geo":
        return ground_truth in solution_str
    raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
""",
        lambda f: verl_scores(f, "7", {}),
        {"data_source": "geo", "reward_model": {"style": "rule", "ground_truth": "7"}},
    ),
    "verl, dict": Style(
        "verl",
        """
def f(data_source, solution_str, ground_truth, extra_info, strict=False, **kwargs):
    acc = ground_truth in solution_str
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": solution_str[-20:], "index": extra_info["index"]}
""",
        lambda f: verl_scores(f, "7", {"index": 4}),
        {"data_source": "geo", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 4}},
        sub_scores=("acc", "pred", "index"),
    ),
    "verl, batch": Style(
        "verl",
        """
def f(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(g in s) for s, g in zip(solution_strs, ground_truths, strict=True)]
""",
        lambda f: f(["geo"] * 4, TEXTS, ["7"] * 4, [{}] * 4),
        {"data_source": "geo", "reward_model": {"ground_truth": "7"}},
    ),
    "verl, async": Style(
        "verl",
        """
import asyncio
async def f(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(ground_truth in solution_str)}
""",
        lambda f: [asyncio.run(f("geo", text, "7"))["score"] for text in TEXTS],
        {"data_source": "geo", "reward_model": {"ground_truth": "7"}},
    ),
}  # fmt: skip


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Style]:
    monkeypatch.chdir(tmp_path)
    found = STYLES[request.param]
    Path("theirs.py").write_text(found.source)
    yield found
    sys.modules.pop(str(tmp_path / "theirs.py"), None)


def called_by_hand(style: Style) -> list[Any]:
    spec = importlib.util.spec_from_file_location("by_hand", "theirs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with stand_ins():
        spec.loader.exec_module(module)
    found = vars(module).get(style.name) or module.orms[style.name]
    return style.by_hand(found() if isinstance(found, type) else found)


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_a_function_of_another_system_scores_as_called_by_hand(
    style: Style, timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    named = f"theirs.py:{style.name}"
    with (
        caplog.at_level(logging.INFO, "rl_vlm.reward"),
        RewardSuite(RewardsConfig(reward_funcs=[RewardSpec(function=named, timeout=timeout)])) as suite,
    ):
        one = group(TEXTS, **style.columns)
        suite.check_columns(style.columns)
        suite.use_forms(suite.find_forms(lambda _: one.prompt.sample))
        table = suite.score([one], STATE)
    assert table.fault_messages == {}
    expected = [float(score) for score in called_by_hand(style)]
    assert len(set(expected)) > 1, "a test that all completions pass shows nothing"
    assert rounded(table) == [[[round(score, 4)] for score in expected]]
    assert {name.partition("/")[2] for name in table.breakdown} == set(style.sub_scores)
    mentions = [record.getMessage() for record in caplog.records if "has the protocol" in record.getMessage()]
    adapted = style.system in ("EasyR1", "ms-swift", "verl") or "kwargs.get('image_path')" in style.source
    assert mentions == ([f"reward function {suite.names[0]!r} has the protocol of {style.system}"] if adapted else [])


def test_settings_of_their_own_are_kwargs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(STYLES["easyr1, batch"].source)
    spec = RewardSpec(function="theirs.py:f", kwargs={"format_weight": 0.5})
    with RewardSuite(RewardsConfig(reward_funcs=[spec])) as suite:
        assert rounded(suite.score([group(TEXTS, solution="7")], STATE)) == [[[1.0], [0.0], [0.0], [0.0]]]
    with pytest.raises(RewardError, match=r"has no argument 'format_wight' \(did you mean 'format_weight'\?\)"):
        RewardSuite(RewardsConfig(reward_funcs=[RewardSpec(function="theirs.py:f", kwargs={"format_wight": 0.5})]))


def test_a_dict_without_a_score_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text("def f(reward_input):\n    return {'accuracy': 1.0}\n")
    with RewardSuite(RewardsConfig(reward_funcs=["theirs.py:f"])) as suite:
        table = suite.score([group(TEXTS, solution="7")], STATE)
    assert table.fault_counts == {("f", "type"): 4}
    assert "without 'overall', but with 'accuracy'" in table.fault_messages[FaultKey("f", "type")]


PER_ROW = {
    "verl": "def f(data_source, solution_str, ground_truth, extra_info=None{more}):",
    "verl, async": "async def f(data_source, solution_str, ground_truth, extra_info=None{more}):",
    "EasyR1": "def f(predict, ground_truth{more}):",
}
"""The first lines of functions that are called once per completion."""


@pytest.fixture(params=PER_ROW)
def first_line(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    yield PER_ROW[request.param]
    sys.modules.pop(str(tmp_path / "theirs.py"), None)


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_a_column_with_the_name_of_a_setting_does_not_reach_it(first_line: str, timeout: float | None) -> None:
    head = first_line.format(more=", method='strict'")
    Path("theirs.py").write_text(f"{head}\n    return float(method == 'strict')\n")
    spec = RewardSpec(function="theirs.py:f", timeout=timeout)
    with RewardSuite(RewardsConfig(reward_funcs=[spec])) as suite:
        one = group(TEXTS, solution="7", method="flexible")
        suite.check_columns(["solution", "method"])
        assert rounded(suite.score([one], STATE)) == [[[1.0]] * 4]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_settings_reach_keyword_arguments_without_names_and_columns_do_not(
    first_line: str, timeout: float | None
) -> None:
    Path("theirs.py").write_text(f"{first_line.format(more=', **kwargs')}\n    return sum(kwargs.values())\n")
    spec = RewardSpec(function="theirs.py:f", kwargs={"bonus": 0.25, "malus": -1.0}, timeout=timeout)
    with RewardSuite(RewardsConfig(reward_funcs=[spec])) as suite:
        assert rounded(suite.score([group(TEXTS, solution="7", level=3)], STATE)) == [[[-0.75]] * 4]


def test_a_setting_without_a_default_must_be_set(first_line: str) -> None:
    Path("theirs.py").write_text(f"{first_line.format(more=', *, scale')}\n    return scale\n")
    with pytest.raises(RewardError, match=r"'f' needs scale: set its `kwargs`"):
        RewardSuite(RewardsConfig(reward_funcs=["theirs.py:f"]))


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_an_exception_for_one_completion_is_a_fault_of_that_completion(first_line: str, timeout: float | None) -> None:
    text = "solution_str" if "solution_str" in first_line else "predict"
    body = f"    word = {text}.split()[0]\n    if word in ERRORS: raise ERRORS[word]\n    return float(len(word))\n"
    errors = "ERRORS = {'panic': BaseException(), 'interrupt': KeyboardInterrupt(), 'end': GeneratorExit()}\n"
    Path("theirs.py").write_text(f"{errors}{first_line.format(more='')}\n{body}")
    with RewardSuite(RewardsConfig(reward_funcs=[RewardSpec(function="theirs.py:f", timeout=timeout)])) as suite:
        table = suite.score([group(["a b", "", "ccc", " ", "panic", "interrupt", "end"], solution="7")], STATE)
    assert rounded(table) == [[[1.0], [None], [3.0], *[[None]] * 4]]
    assert table.fault_counts == {("f", "exception"): 5}
    assert "IndexError: list index out of range (theirs.py:3 in f)" in table.fault_messages[FaultKey("f", "exception")]


GOLDS = {"ground_truth": "a", "reward_model": {"ground_truth": "b"}, "solution": "c", "answer": "d"}
"""Columns with gold answers that differ, the first that counts first."""


@pytest.mark.parametrize(("first", "gold"), [*enumerate("abcd")])
def test_the_first_column_with_a_gold_answer_counts(first: int, gold: str) -> None:
    golds = {name: [None] if i < first else [value] for i, (name, value) in enumerate(GOLDS.items())}
    (row,) = rows_of(["7"], {"completion_ids": [[1]], "data_source": None, "extra_info": None} | golds)
    assert row.ground_truth == gold


def test_scores_that_are_there_and_those_that_come_later_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(
        "import asyncio\nasync def later(score):\n    await asyncio.sleep(0.1 / score)\n    return score\n"
        "def f(predict, ground_truth):\n    score = float(predict)\n    return later(score) if score % 2 else score\n"
    )
    with RewardSuite(RewardsConfig(reward_funcs=["theirs.py:f"])) as suite:
        table = suite.score([group(["1", "2", "3", "x", "4", "5", "7"], solution="7")], STATE)
    assert rounded(table) == [[[1.0], [2.0], [3.0], [None], [4.0], [5.0], [7.0]]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def f(completions): ...", True),
        ("async def f(data_source, solution_str, ground_truth): ...", True),
        ("from swift.plugin import AsyncORM\nclass f(AsyncORM):\n    async def __call__(self, completions): ...", True),
        ("def f(reward_inputs): ...", False),
        ("class f:\n    def __call__(self, completions): ...", False),
    ],
)
def test_async_functions_are_not_called_before_a_run(
    source: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(source)
    reason = why_not_scored(Reward(RewardSpec(function="theirs.py:f")))
    assert ("async" in (reason or "")) == expected


def test_a_sub_score_called_reward_does_not_replace_the_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text("def f(solution_str, ground_truth):\n    return {'score': 1.0, 'reward': 0.3}\n")
    with RewardSuite(RewardsConfig(reward_funcs=["theirs.py:f"])) as suite:
        assert rounded(suite.score([group(TEXTS, solution="7")], STATE)) == [[[1.0]] * 4]


PLUGIN = """
from swift.llm import PtEngine
from swift.plugin import ORM, orms
class Mine(ORM):
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)
class Engine(ORM):
    def __init__(self, args=None):
        self.engine = PtEngine(args)
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)
orms['mine'] = Mine
orms['engine'] = Engine
"""


def test_a_plugin_that_imports_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(PLUGIN)
    assert Reward(RewardSpec(function="theirs.py:mine")).name == "Mine"
    assert caplog.messages == [
        "the file of reward function 'Mine' imports swift.llm.PtEngine of ms-swift, which rl-vlm does not have: code "
        "that uses it fails"
    ]
    with pytest.raises(
        RewardError, match=r"NotImplementedError: swift\.llm\.PtEngine is a part of ms-swift that rl-vlm"
    ):
        RewardSuite(RewardsConfig(reward_funcs=["theirs.py:engine"]))
    with pytest.raises(RewardError, match=r"no function 'minf' \(did you mean 'mine'\?\); it defines: .*mine"):
        RewardSuite(RewardsConfig(reward_funcs=["theirs.py:minf"]))


def test_two_plugins_may_register_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, score in (("first", 1.0), ("second", 2.0)):
        Path(f"{name}.py").write_text(
            "from swift.plugin import ORM, orms\n"
            f"class {name.title()}(ORM):\n    def __call__(self, completions): return [{score}] * len(completions)\n"
            f"orms['mine'] = {name.title()}\n"
        )
    names = [Reward(RewardSpec(function=f"{name}.py:mine")).name for name in ("first", "second", "first")]
    assert names == ["First", "Second", "First"]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_a_static_method_is_named_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(
        "class Module:\n    @staticmethod\n    def iou_reward(completions, **kwargs): return [0.5] * len(completions)\n"
        "    def own(self, completions): return [1.0] * len(completions)\n"
    )
    spec = RewardSpec(function="theirs.py:Module.iou_reward", timeout=timeout)
    with RewardSuite(RewardsConfig(reward_funcs=[spec])) as suite:
        assert suite.names == ["iou_reward"]
        assert rounded(suite.score([group(TEXTS, solution="7")], STATE)) == [[[0.5]] * 4]
    with pytest.raises(RewardError, match=r"Module\.own is called on an instance of Module: make it a `@staticmethod`"):
        RewardSuite(RewardsConfig(reward_funcs=["theirs.py:Module.own"]))


def test_no_stand_in_is_left_behind() -> None:
    with stand_ins():
        from swift.plugin import ORM  # type: ignore[import-not-found]

        assert ORM(args=3).args == 3
    assert [name for name in sys.modules if name.partition(".")[0] == "swift"] == []
