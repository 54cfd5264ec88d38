import pyarrow.parquet
import torch

from rl_vlm.log.completions import completion_rows, drop_after, print_rows, window_path, write_rows
from rl_vlm.types import Completion, Group, Prompt, RewardTable, Sample, ScoredGroup


def scored_group() -> ScoredGroup:
    """Two completions: one with both rewards, one whose second reward failed."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}
    prompt = Prompt(Sample("row-1", [message], [], {}, "Which digit?"), torch.arange(7), {}, {})
    completions = [
        Completion(torch.arange(2), torch.zeros(2), "stop", "seven"),
        Completion(torch.arange(3), torch.zeros(3), "length", "nine nine"),
    ]
    return ScoredGroup(
        Group("0/0/row-1", prompt, completions, 4),
        scores_GF=torch.tensor([[1.0, 0.5], [0.0, torch.nan]]),
        rewards_G=torch.tensor([1.5, torch.nan]),
        advantages_G=torch.tensor([0.25, 0.0]),
        valid_G=torch.tensor([True, False]),
        has_variance=False,
    )


def rows() -> list[dict]:
    breakdown = {"style/note": [["good", None]]}
    table = RewardTable(
        ["accuracy", "style"],
        torch.zeros(1, 2, 2),
        torch.tensor([[True, False]]),
        torch.tensor([[False, True]]),
        breakdown,
        faults={(0, 1): ["style/timeout: more than 1 s"]},
    )
    return completion_rows(3, [scored_group()], table)


FIRST = {
    "step": 3, "group_id": "0/0/row-1", "sample_id": "row-1", "completion_index": 0, "policy_version": 4,
    "prompt": "user: <image> Which digit?", "completion": "seven", "finish_reason": "stop", "prompt_length": 7,
    "completion_length": 2, "image_sizes": [], "model_image_sizes": [], "accuracy": 1.0, "style": 0.5, "reward": 1.5,
    "advantage": 0.25, "fault": None, "style/note": "good",
}  # fmt: skip


def test_a_row_per_completion():
    first, second = rows()
    assert first == FIRST
    assert (second["style"], second["reward"], second["advantage"]) == (None, None, 0.0)
    assert second["fault"] == "style/timeout: more than 1 s"


def test_rows_come_back_from_parquet(tmp_path):
    path = window_path(tmp_path, 3)
    assert path == tmp_path / "completions" / "completions_00003.parquet"
    write_rows(path, rows())
    assert pyarrow.parquet.read_table(path).to_pylist() == rows()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_columns_that_only_some_rows_have(tmp_path):
    write_rows(tmp_path / "rows.parquet", [{"a": 1}, {"a": 2, "b": "two"}])
    found = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert found == [{"a": 1, "b": None}, {"a": 2, "b": "two"}]


def test_values_of_mixed_types_are_written_as_text(tmp_path):
    write_rows(tmp_path / "rows.parquet", [{"a": 1, "b": 1}, {"a": 2, "b": "one"}, {"a": 3, "b": {1, 2}}])
    found = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert found == [{"a": 1, "b": "1"}, {"a": 2, "b": "one"}, {"a": 3, "b": "{1, 2}"}]


def test_windows_and_evaluations_of_later_steps_are_dropped(tmp_path):
    folder = tmp_path / "completions"
    for step in (0, 2, 4):
        write_rows(window_path(tmp_path, step), rows())
        write_rows(folder / f"held_out_{step:05d}.parquet", rows())
    drop_after(tmp_path, 2, next_window=2)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["completions_00000.parquet", "held_out_00000.parquet", "held_out_00002.parquet"]
    drop_after(tmp_path / "nothing", 1, next_window=0)
    drop_after(tmp_path, None, next_window=0)
    assert not folder.exists()


def test_printed_completions(capsys):
    print_rows(rows())
    assert capsys.readouterr().out == (
        "\n[0/0/row-1 #0, reward 1.500]\nuser: <image> Which digit?\n-> seven\n"
        "\n[0/0/row-1 #1, reward none]\nuser: <image> Which digit?\n-> nine nine\n"
    )
