"""Parts of the doctor on literal values: versions, disk, kinds, gold answers, and the report."""

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from PIL import Image

from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import Finding, Severity, Stopped
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks import machine, smoke
from rl_vlm.tools.checks.diagnosis import Diagnosis, attempt, collect
from rl_vlm.tools.checks.duplicates import find_common_picture, find_duplicates
from rl_vlm.tools.checks.golds import check_golds, gives_away, gold_lengths
from rl_vlm.tools.checks.rows import Split, inspect_rows, row_findings, usable_rows
from rl_vlm.tools.checks.settings import high_learning_rate, sampling_temperature
from rl_vlm.tools.checks.smoke import check_constant_rewards
from rl_vlm.tools.checks.table import Subject
from rl_vlm.tools.checks.text import report_text
from tests.helpers.tiny_run import make_config

LENGTH = f"{__name__}:length"
FAILING = f"{__name__}:failing"


def length(completions: list[str], solution: list[str]) -> list[float]:
    """A reward that depends on lengths: few gold answers have the highest score."""
    return [1 / (1 + len(text)) for text in completions]


def failing(completions: list[str], solution: list[str]) -> list[float]:
    return [float(int(gold) == 7) for gold in solution]


def of_verl(data_source: str, solution_str: str, ground_truth: str, wrong: str) -> float:
    return float(solution_str == ground_truth != wrong)


def minus_error(completions: list[str], solution: list[str]) -> list[float]:
    numbers = [float(text) if text.isdigit() else 100.0 for text in completions]
    return [-abs(number - float(gold)) for number, gold in zip(numbers, solution, strict=True)]


def nothing(completions: list[str], solution: list[str]) -> list[float]:
    return [0.0 for _ in completions]


def label_is(completions: list[str], label: list[str | None]) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, label, strict=True)]


def by_method(completions: list[str], solution: list[str], method: list[str]) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]


def of_numbers(completions: list[str], solution: list[str]) -> list[float]:
    golds = [int(gold) for gold in solution]
    return [float(text == f"#### {gold}") for text, gold in zip(completions, golds, strict=True)]


def rounded(completions: list[str], solution: list[str]) -> list[float]:
    best = [(0.1 + 0.2) / 0.3 if int(gold) % 2 else 1.0 for gold in solution]
    return [score * (text == gold) for text, gold, score in zip(completions, solution, best, strict=True)]


def with_times(completions: list[str], solution: list[str], video_frame_times: list[Any]) -> list[float]:
    ends = [times[0][-1] for times in video_frame_times]
    golds = zip(completions, solution, ends, strict=True)
    return [float(text == gold and float(gold) == end) for text, gold, end in golds]


def with_any(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    return with_times(completions, solution, columns["video_frame_times"])


def with_images(completions: list[str], solution: list[str], images: list[Any]) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, solution, strict=True)]


async def served(completions: list[str], solution: list[str]) -> list[float]:
    raise AssertionError("a function that may cost much is not called")


@pytest.mark.parametrize(("installed", "number"), [("5.17.0", 1), ("5.19.0", 0)])
def test_a_family_that_needs_a_newer_transformers(installed: str, number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rl_vlm.model.family.version", lambda name: installed)
    found = machine.old_transformers("minicpmv4_6", installed)
    assert [finding.what for finding in found] == ["minicpmv4_6 needs transformers 5.19; 5.17.0 is installed"] * number
    assert list(machine.old_transformers("qwen2_vl", installed)) == []


@pytest.mark.parametrize(
    ("settings", "num_steps", "expected"),
    [
        ({"save_steps": 10}, 100, 10),
        ({"save_steps": 10}, 95, 10),
        ({"save_steps": 0}, 100, 1),
        ({"save_steps": 10, "save_total_limit": 2}, 100, 3),
        ({"save_steps": 60, "save_total_limit": 5}, 100, 2),
    ],
)
def test_checkpoints_on_disk_at_once(settings: dict[str, Any], num_steps: int, expected: int, tmp_path: Path):
    assert machine.num_kept(make_config("m", tmp_path, **settings), num_steps) == expected


def test_servers_to_join(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = make_config("m", tmp_path, engine="vllm_server", vllm_server_base_url=[url])
        assert list(machine.unreachable_servers(config)) == []
    (finding,) = machine.unreachable_servers(config)
    assert url in finding.what


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine, "free_bytes", lambda path: 64 * 2**20)
    assert list(machine.small_shared_memory(make_config("m", tmp_path))) == []
    (finding,) = machine.small_shared_memory(make_config("m", tmp_path, dataloader_num_workers=1))
    assert "64 MiB free" in finding.what


def split_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Split:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Which?", "image": "0.png"} | row) + "\n" for row in rows))
    loaded = load_rows(DataConfig(dataset_name=str(path)), "train")
    facts = list(inspect_rows(loaded))
    return Split(usable_rows(loaded, facts), facts)


def gold_findings(split: Split, *functions: Any) -> Diagnosis:
    return collect(check_golds(split, RewardSuite(RewardsConfig(reward_funcs=[*functions])).functions))


def kinds(diagnosis: Diagnosis) -> list[tuple[int | None, str]]:
    return [(finding.row, finding.kind) for finding in diagnosis.findings]


def test_gold_answers(tmp_path: Path):
    rows = [{"solution": gold} for gold in ("7", "<answer>8</answer>", "", 9, None, [1])]
    assert kinds(gold_findings(split_of(tmp_path, rows), "exact_match", "format_tags")) == [
        (2, "gold answer below the maximum of its reward"),
        (5, "gold answer that a reward fails on"),
        (4, "row without a gold answer"),
    ]


def test_gold_answers_of_another_systems_rows(tmp_path: Path):
    rows = [{"prompt": None, "problem": "Which?", "answer": answer} for answer in ("7", "8", "")]
    (finding,) = gold_findings(split_of(tmp_path, rows), "exact_match").findings
    assert finding.what.endswith("gives its gold answer 0, and others 1: solution ''")


def test_a_reward_whose_maximum_is_zero(tmp_path: Path):
    rows = [{"solution": str(gold)} for gold in (7, 8, 9)]
    assert kinds(gold_findings(split_of(tmp_path, rows), f"{__name__}:minus_error")) == []


def test_a_reward_that_reads_no_gold_answer_is_found(tmp_path: Path):
    rows = [{"solution": str(gold)} for gold in (7, 8, 9)]
    found = gold_findings(split_of(tmp_path, rows), f"{__name__}:nothing")
    assert kinds(found) == [(row, "gold answer below the maximum of its reward") for row in range(3)]


def test_rows_without_a_value_for_a_reward_that_scores_them(tmp_path: Path):
    rows = [{"label": "7"}, {"label": "8"}, {"label": None}]
    assert kinds(gold_findings(split_of(tmp_path, rows), f"{__name__}:label_is")) == [(2, "row without a gold answer")]


def test_a_constant_column_beside_gold_answers(tmp_path: Path):
    rows = [{"solution": gold, "method": "default"} for gold in ("7", "8")]
    assert kinds(gold_findings(split_of(tmp_path, rows), f"{__name__}:by_method")) == []


def test_a_damaged_image_ends_the_checks_of_one_function(tmp_path: Path):
    split = split_of(tmp_path, [{"solution": "7"}, {"solution": "8"}])
    path = tmp_path / "0.png"
    path.write_bytes(path.read_bytes()[:40])
    found = gold_findings(split, f"{__name__}:with_images", "exact_match")
    assert [(finding.severity, finding.kind) for finding in found.findings] == [("error", "unreadable image")]
    assert found.not_checked == [f"gold answers of {split.rows.name} under with_images: a row cannot be read"]
    assert found.checked == [f"gold answers of {split.rows.name} under exact_match"]


def test_gold_answers_of_verls_rows_and_functions(tmp_path: Path):
    """Neither the data's source nor the object around a gold answer counts as a gold answer."""
    rows = [
        {
            "data_source": "geo",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"split": "train"},
        }
        for gold in ("7", "8", "9")
    ]
    found = gold_findings(split_of(tmp_path, rows), {"function": f"{__name__}:of_verl", "kwargs": {"wrong": "9"}})
    assert kinds(found) == [(2, "gold answer below the maximum of its reward")]
    assert found.findings[0].what.endswith("reward_model {'style': 'rule', 'ground_truth': '9'}, solution '9'")


def test_every_column_of_a_layout_is_inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    row = {"messages": [{"role": "user", "content": "What is in <bbox>?"}], "objects": {"bbox": [[1, 2, 3]]}}
    Dataset.from_list([row]).to_parquet(tmp_path / "rows.parquet")
    (fact,) = inspect_rows(load_rows(DataConfig(dataset_name=str(tmp_path / "rows.parquet")), "train"))
    assert "[[1, 2, 3]] for objects.bbox" in str(fact.note.finding)


def test_duplicates_in_two_sources(tmp_path: Path):
    names = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for name, prompts in zip(names, (["x", "y"], ["z", "y"]), strict=True):
        Path(name).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    rows = load_rows(DataConfig(dataset_name=[*names]), "train")
    facts = list(inspect_rows(rows))
    (finding,) = find_duplicates([Split(usable_rows(rows, facts), facts)], [], decode=False)
    assert finding.what == f"{names[1]}, row 1: {names[0]}, row 1 has the same prompt and images"


def test_rows_of_an_environment_differ_by_any_column(tmp_path: Path):
    path = tmp_path / "games.jsonl"
    rows = [{"id": f"game-{i}", "prompt": "Go!", "start": start} for i, start in enumerate(([0, 1], [2, 3], [0, 1]))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = [load_rows(DataConfig(dataset_name=name, text_only=True), "train") for name in (str(path), "draws:5")]
    games, draws = ([Split(usable_rows(rows, facts), facts)] for rows in loaded if (facts := list(inspect_rows(rows))))
    (finding,) = find_duplicates(games, [], decode=False, has_environment=True)
    assert finding.what == f"{path}, row 2: {path}, row 0 has the same prompt and images"
    assert list(find_duplicates(draws, [], decode=False, has_environment=True)) == []
    assert len(list(find_duplicates(games, [], decode=False))) == 2


def test_one_function_that_applies_is_enough(tmp_path: Path):
    split = split_of(tmp_path, [{"solution": "7"}, {"solution": "a cup"}])
    assert kinds(gold_findings(split, "numeric")) == [(1, "row without a gold answer")]
    assert kinds(gold_findings(split, "numeric", "exact_match")) == []


def test_scores_that_depend_on_lengths_are_no_faults(tmp_path: Path):
    split = split_of(tmp_path, [{"solution": "x" * n} for n in range(1, 6)])
    assert kinds(gold_findings(split, LENGTH)) == []


def test_rounding_does_not_put_a_gold_answer_below_the_maximum(tmp_path: Path):
    """(0.1 + 0.2) / 0.3 is above 1 by a rounding error."""
    split = split_of(tmp_path, [{"solution": gold} for gold in ("1", "3", "5", "4")])
    assert kinds(gold_findings(split, f"{__name__}:rounded")) == []


@pytest.mark.parametrize("name", ["with_times", "with_any"])
def test_a_function_that_reads_the_times_of_videos_gets_them(name: str, tmp_path: Path):
    """The rows have four frames without a rate, which is two frames per second."""
    rows = [{"image": None, "video": ["0.png"] * 4, "solution": gold} for gold in ("1.5", "2")]
    found = gold_findings(split_of(tmp_path, rows), f"{__name__}:{name}")
    assert kinds(found) == [(1, "gold answer below the maximum of its reward")]
    assert found.checked == [f"gold answers of {tmp_path / 'rows.jsonl'} under {name}"]


def test_a_function_that_fails_on_gold_answers(tmp_path: Path):
    diagnosis = gold_findings(split_of(tmp_path, [{"solution": "7"}, {"solution": "seven"}]), FAILING)
    assert {kind for _, kind in kinds(diagnosis)} == {"gold answer that a reward fails on"}
    assert "invalid literal for int()" in diagnosis.findings[-1].what


@pytest.mark.parametrize("bad", [0, 3, 8])
def test_a_gold_answer_on_which_a_function_raises_is_a_finding_on_its_row(bad: int, tmp_path: Path):
    rows = [{"solution": "a dozen" if i == bad else str(i)} for i in range(9)]
    found = gold_findings(split_of(tmp_path, rows), f"{__name__}:of_numbers")
    assert kinds(found) == [(bad, "gold answer that a reward fails on")]


def test_functions_that_may_cost_much_are_not_called(tmp_path: Path):
    diagnosis = gold_findings(split_of(tmp_path, [{"solution": "7"}, {"solution": None}]), f"{__name__}:served")
    assert diagnosis.findings == []
    assert len(diagnosis.not_checked) == 1


def test_a_constant_gold_answer(tmp_path: Path):
    assert kinds(gold_findings(split_of(tmp_path, [{"solution": "7"}] * 3), "exact_match")) == [
        (None, "constant gold answer")
    ]


@pytest.mark.parametrize(
    ("prompt", "is_given"),
    [
        ("Which? The answer is 12.", True),
        ("Which? Answer: 12", True),
        ("Which? <answer>12</answer>", True),
        ("Is it 11 or 12", False),
        ("Which? The answer is 112.", False),
        ("The answer is 12. Is that right?", False),
    ],
)
def test_prompts_that_end_with_their_answer(prompt: str, is_given: bool, tmp_path: Path):
    split = split_of(tmp_path, [{"prompt": prompt, "solution": "12"}, {"solution": "3"}])
    found = kinds(gold_findings(split, "exact_match"))
    assert found == [(0, "prompt that ends with its answer")] * is_given


@pytest.mark.parametrize("gold", ["B", "<answer>B</answer>", r"\boxed{B}", "#### B", "$B$"])
@pytest.mark.parametrize(
    ("prompt", "is_given"),
    [
        ("Which? Answer: B", True),
        ("Which? <answer> b </answer>.", True),
        (r"Which? \boxed{B}", True),
        ("Which?\n#### B", True),
        ("Is it A or B", False),
        ("Is it A or $B$", False),
        (r"Is \boxed{B} right?", False),
    ],
)
def test_the_form_of_a_gold_answer_does_not_hide_it_in_a_prompt(prompt: str, is_given: bool, gold: str, tmp_path: Path):
    parsed = split_of(tmp_path, [{"prompt": prompt}]).rows.parse(0)
    assert gives_away(parsed, gold) == is_given


@pytest.mark.parametrize("prompt", ["Where? answer: [1, 2, 3, 4]", "Where? <answer>[1,2, 3,4]</answer>"])
def test_a_box_in_a_prompt(prompt: str, tmp_path: Path):
    parsed = split_of(tmp_path, [{"prompt": prompt}]).rows.parse(0)
    assert gives_away(parsed, [1, 2, 3, 4])
    assert not gives_away(parsed, [1, 2, 3, 5])


def test_prompts_that_end_with_a_message_of_the_assistant(tmp_path: Path):
    messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "7"}]
    split = split_of(tmp_path, [{}, {"prompt": messages}])
    (finding,) = row_findings(split.rows, split.facts)
    assert (finding.severity, finding.row, finding.kind) == ("warning", 1, "prompt that ends with an answer")


@pytest.mark.parametrize("ending", [Stopped(15), KeyboardInterrupt(), BaseException("a panic\nof Rust")], ids=repr)
def test_a_stop_is_no_finding_and_anything_else_that_ends_the_two_steps_is(ending, tmp_path, monkeypatch):
    def train(config: Any) -> None:
        raise ending

    monkeypatch.setattr(smoke, "train", train)
    monkeypatch.setattr(smoke, "few_rows", lambda usable: {})
    yielded, rows = [], split_of(tmp_path, [{}]).usable
    is_stop = isinstance(ending, Stopped | KeyboardInterrupt)
    with pytest.raises(type(ending)) if is_stop else nullcontext():
        yielded += attempt(smoke.run_two_steps(make_config("m", tmp_path), "m", rows, None))
    found = [finding.what for finding in yielded]
    assert found == ([] if is_stop else ["BaseException: a panic of Rust"])


def test_a_problem_without_a_kind_of_its_own(tmp_path: Path):
    split = split_of(tmp_path, [{"solution": "7", "tools": "[{}]"}])
    (finding,) = row_findings(split.rows, split.facts)
    assert (finding.kind, finding.row) == ("row that cannot be used", 0)


@pytest.mark.parametrize(
    ("severities", "status"),
    [([], 0), (["info"], 0), (["info", "warning"], 1), (["error", "warning"], 2)],
)
def test_the_exit_status_is_that_of_the_worst_finding(severities: list[Severity], status: int):
    assert Diagnosis([Finding(severity, "k", "w", "r") for severity in severities]).status == status


def test_the_report_groups_findings_and_names_the_first():
    rows = [Finding("warning", "duplicate", f"d, row {row}: row 0", "Leave it out.", "d", row) for row in range(1, 8)]
    text = report_text(Diagnosis([*rows, Finding("error", "server", "no answer", "Start it.")], ["a"], ["b"]))
    assert text == (
        "checked: a\nnot checked: b\n\n"
        "error: server\n  no answer\n  remedy: Start it.\n\n"
        "warning: duplicate: 7 rows of d\n"
        "  d, row 1: row 0\n  d, row 2: row 0\n  d, row 3: row 0\n  d, row 4: row 0\n  d, row 5: row 0\n"
        "  and 2 more, which --json lists\n  remedy: Leave it out.\n\n"
        "1 error, 7 warnings\n"
    )


SMALL = {"image": "0.png", "prompt": "Where?"}


def box_rows(tmp_path: Path, golds: list[Any]) -> Diagnosis:
    """What is found of gold boxes in an image of 8 × 8 pixels."""
    diagnosis = gold_findings(split_of(tmp_path, [SMALL | {"solution": gold} for gold in golds]), BOXES)
    return collect(finding for finding in diagnosis.findings if "box" in finding.kind)


def boxes(completions: list[str], solution: list[Any]) -> list[float]:
    return [float(str(gold) in text) for text, gold in zip(completions, solution, strict=True)]


BOXES = f"{__name__}:boxes"


@pytest.mark.parametrize(
    ("write"),
    [
        lambda box: box,
        lambda box: f"<answer>{box}</answer>",
        lambda box: json.dumps([{"bbox_2d": box, "label": "cup"}]),
        lambda box: f"```json\n{json.dumps({'bbox': box})}\n```",
    ],
)
def test_boxes_that_cannot_be_in_their_image(write: Any, tmp_path: Path):
    sound = [[0, 0, 8, 8], [1, 2, 3, 4], [0, 1, 5, 7], [2, 2, 6, 8]]
    found = box_rows(tmp_path, [write(box) for box in [*sound, [0, 0, 9, 4], [5, 1, 2, 4], [-1, 0, 4, 4]]])
    assert kinds(found) == [(row, "box outside the image or inverted") for row in (4, 5, 6)]
    assert "leaves its image, which is 8 wide and 8 high" in found.findings[0].what
    assert "[5, 1, 2, 4] is inverted" in found.findings[1].what


@pytest.mark.parametrize(
    ("golds", "expected"),
    [
        ([[100 * i, 200, 100 * i + 50, 400] for i in range(1, 7)], []),  # per mille
        ([[0.1 * i, 0.2, 0.1 * i + 0.2, 0.4] for i in range(1, 7)], []),
        ([*[[0.1 * i, 0.2, 0.1 * i + 0.2, 0.4] for i in range(1, 7)], [0.5, 0.5, 1.5, 0.7]], [6]),
        ([[5, 5, 2, 2], [4, 6, 3, 1], [6, 6, 1, 1], [0, 0, 4, 4]], [None]),  # width and height
        ([*["a cup"] * 20, [4, 3, 2, 1]], []),
    ],
)
def test_boxes_have_the_coordinates_that_most_of_them_can_have(golds: list[Any], expected: list[Any], tmp_path: Path):
    assert [row for row, _ in kinds(box_rows(tmp_path, golds))] == expected


@pytest.mark.parametrize(("num_same", "num"), [(4, 7), (3, 6), (2, 2)])
def test_one_picture_in_most_rows(num_same: int, num: int, tmp_path: Path):
    rows = [{"prompt": f"{i}?", "image": f"{i}.png"} for i in range(num)]
    split = split_of(tmp_path, [{"image": "0.png"}])
    for i in range(num):
        Image.new("RGB", (8, 8), (0 if i < num_same else i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = load_rows(split.rows.config, "train")
    facts = list(inspect_rows(loaded))
    found = find_common_picture(Split(usable_rows(loaded, facts), facts))
    assert [finding.what.split(": ")[1] for finding in found] == ["the picture of row 0 is in 4 of 7 rows"] * (num == 7)


@pytest.mark.parametrize(("temperature", "number"), [(0.29, 1), (0.3, 0), (1.0, 0), (1.5, 0), (1.51, 1)])
def test_sampling_temperature(temperature: float, number: int, tmp_path: Path):
    found = collect(sampling_temperature(Subject(make_config("m", tmp_path, temperature=temperature)))).findings
    assert [(finding.severity, finding.kind) for finding in found] == [("warning", "sampling temperature")] * number


@pytest.mark.parametrize(
    ("millions", "settings", "number"),
    [
        (101, {"learning_rate": 1.1e-4}, 1),
        (101, {"learning_rate": 1e-4}, 0),
        (100, {"learning_rate": 1e-2}, 0),
        (3000, {"learning_rate": 9e-4, "use_peft": True}, 0),
        (3000, {"learning_rate": 2e-3, "use_peft": True}, 1),
    ],
)
def test_learning_rate(millions: int, settings: dict[str, Any], number: int, tmp_path: Path):
    assert len([*high_learning_rate(make_config("m", tmp_path, **settings), millions * 1_000_000)]) == number


def test_gold_answers_longer_than_completions(tmp_path: Path):
    golds = ["a b c", "a b c d", "long-words of-four tokens here", r"\boxed{a b}", "a b c d\n#### 7"]
    split = split_of(tmp_path, [{"solution": gold} for gold in golds])
    functions = RewardSuite(RewardsConfig(reward_funcs=["exact_match"])).functions
    diagnosis = collect(gold_lengths(split, functions, lambda text, **_: {"input_ids": text.split()}, 3))
    assert kinds(diagnosis) == [(row, "gold answer longer than a completion") for row in (1, 2)]
    assert "has 4 tokens, more than rollout.max_completion_length 3" in diagnosis.findings[0].what


def half(completions: list[str]) -> list[float]:
    return [0.5 for _ in completions]


@pytest.mark.parametrize(
    ("functions", "scores", "expected"),
    [
        (["exact_match", f"{__name__}:half"], [[0.0, 1.0], [0.5, 0.5]], [("warning", "half")]),
        ([f"{__name__}:half"], [[0.5, 0.5]], [("error", "half")]),
        (["exact_match", f"{__name__}:nothing"], [[0.0, 1.0], [0.0, 0.0]], [("warning", "nothing")]),
        (["exact_match", "format_tags"], [[0.0, 0.0], [0.0, 1.0]], []),
        (["exact_match", "repetition"], [[0.0, 1.0], [0.0, 0.0]], []),
    ],
)
def test_functions_that_are_constant_over_sampled_completions(
    functions: list[str], scores: list[list[float]], expected: list[tuple[str, str]], tmp_path: Path
):
    split = split_of(tmp_path, [{"solution": "7"}, {"solution": "8"}])
    rewards = RewardsConfig(reward_funcs=[*functions])
    (tmp_path / "completions").mkdir()
    names = RewardSuite(rewards).names
    pq.write_table(pa.table(dict(zip(names, scores, strict=True))), tmp_path / "completions/completions_00000.parquet")
    found = collect(check_constant_rewards(rewards, split.usable, [0, 1], tmp_path))
    assert [(finding.severity, finding.what.split()[0]) for finding in found.findings] == expected
    assert bool(found.checked) is not bool(expected)  # what works on gold answers is said and is no finding
