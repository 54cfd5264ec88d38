"""Several sources as one: rows, names, image folders, shares of draws and resumption."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from launch import cli
from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.check import check_rows, long_row
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.sampler import Draw, PromptSampler, Share
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import CheckpointError, DataError
from rl_vlm.reward.suite import RewardSuite

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders with data in two layouts, and an image of the same name in each."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for folder, color in (("a", RED), ("b", BLUE)):
        Path(folder).mkdir()
        Image.new("RGB", (4, 2), color).save(f"{folder}/x.png")
    Path("a/rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"a{i}", "image": "x.png", "solution": "1"}) + "\n" for i in range(4))
    )
    rows = [{"problem": f"b{i}", "answer": "2", "images": ["x.png"], "level": i} for i in range(2)]
    datasets.Dataset.from_list(rows).to_parquet("b/rows.parquet")


NAMES: list[Any] = ["a/rows.jsonl", "b/rows.parquet"]


def load(*names: Any, **settings: Any) -> Rows:
    return load_rows(DataConfig(dataset_name=list(names or NAMES), **settings), "train")


def pixel(rows: Rows, index: int) -> Any:
    return rows[index].images[0].getpixel((0, 0))


# --- rows


def test_each_source_keeps_its_layout_and_its_image_folder():
    rows = load()
    assert [sample.prompt for sample in rows] == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert [sample.columns.get("solution") for sample in rows] == ["1"] * 4 + ["2"] * 2
    assert (pixel(rows, 3), pixel(rows, 4)) == (RED, BLUE)
    assert rows.place(5) == "b/rows.parquet, row 1"


def test_every_row_has_the_name_of_its_source_unless_it_has_one():
    Path("c.jsonl").write_text('{"prompt": "c0", "data_source": "own"}\n{"prompt": "c1"}\n')
    rows = load("c.jsonl", {"name": "b/rows.parquet"})
    names = ["own", "c.jsonl", "b/rows.parquet", "b/rows.parquet"]
    assert [sample.columns["data_source"] for sample in rows] == names
    assert list(rows.source.values("data_source")) == names
    assert [row["data_source"] for batch in rows.source.batches(range(4), []) for row in batch] == names
    assert "data_source" in rows.columns


def test_columns_are_those_of_all_sources():
    rows = load()
    assert sorted(rows.columns) == ["answer", "data_source", "level", "solution"]
    assert list(rows.source.values("level")) == [None] * 4 + [0, 1]


def test_a_layout_is_that_of_one_source():
    Path("c.jsonl").write_text('{"prompt": "c0", "problem": "easy"}\n')
    rows = load("c.jsonl", "b/rows.parquet")
    assert sorted(rows.columns) == ["answer", "data_source", "level", "problem", "solution"]
    assert rows[0].columns == {"problem": "easy", "data_source": "c.jsonl"}


def test_batches_cross_the_border_between_sources():
    batches = load().source.batches(range(3, 5), ["prompt", "problem"])
    assert [row.get("prompt") or row.get("problem") for batch in batches for row in batch] == ["a3", "b0"]


def test_an_entry_has_settings_of_its_own():
    Path("c.jsonl").write_text('{"q": "c0", "photo": "x.png", "thumb": "x.png"}\n')
    entry = {"name": "c.jsonl", "columns": {"prompt": "q", "image": "photo"}, "ignore_columns": "thumb"}
    rows = load("a/rows.jsonl", entry | {"image_root": "b"})
    assert (rows[4].prompt, pixel(rows, 4), rows[4].columns) == ("c0", BLUE, {"data_source": "c.jsonl"})


def test_a_split_of_an_entry():
    splits: Any = {
        "train": datasets.Dataset.from_list([{"prompt": "train"}]),
        "dev": datasets.Dataset.from_list([{"prompt": "dev"}]),
    }
    datasets.DatasetDict(splits).save_to_disk("saved")
    rows = load("saved@dev", {"name": "saved", "split": "train"}, "saved")
    assert [(sample.prompt, sample.columns["data_source"]) for sample in rows] == [
        ("dev", "saved"), ("train", "saved"), ("train", "saved"),
    ]  # fmt: skip
    assert [sample.sample_id for sample in rows] == ["saved@dev:0", "saved@train:0", "saved:0"]


def test_ids_get_the_name_of_the_source_only_if_they_collide():
    assert [sample.sample_id for sample in load()][3:5] == ["a/rows.jsonl:3", "b/rows.parquet:0"]
    for name in "cd":
        Path(f"{name}.jsonl").write_text(json.dumps({"id": f"{name}-0", "prompt": "p"}) + "\n")
    assert load("c.jsonl", "d.jsonl").sample_ids == ["c-0", "d-0"]


def test_rows_that_are_left_out_are_named_by_their_source():
    Path("c.jsonl").write_text('{"prompt": "c0", "image": "x.png"}\n{"prompt": ""}\n')
    rows = load("a/rows.jsonl", {"name": "c.jsonl", "image_root": "b"}, on_bad_row="drop")
    usable = check_rows(rows, [], Ranks())
    assert usable.indices == [0, 1, 2, 3, 4]
    assert [tuple(each.record[key] for key in ("data", "row", "sample_id")) for each in usable.dropped] == [
        ("c.jsonl", 1, "c.jsonl:1"),
    ]  # fmt: skip


def test_a_source_without_a_prompt_is_named():
    Path("c.jsonl").write_text('{"question": "c0"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl, row 0: found None for a prompt"):
        load("a/rows.jsonl", "c.jsonl")


def test_the_fingerprint_sees_every_source():
    everything = data_fingerprint(load(), range(6))
    assert data_fingerprint(load(), range(6)) == everything
    Path("a/rows.jsonl").write_text(Path("a/rows.jsonl").read_text().replace("a2", "other"))
    assert data_fingerprint(load(), range(6)) != everything


def test_held_out_data_may_be_a_mixture():
    rows = load_rows(DataConfig(eval_dataset_name=NAMES), "eval")
    assert len(rows) == 6
    assert rows.first_value("data_source") == "a/rows.jsonl"


def test_a_dry_run_reads_the_first_row_of_each_source(capsys):
    Path("model").mkdir()
    Path("model/model.safetensors").touch()
    Path("model/config.json").write_text('{"model_type": "qwen2_5_vl"}')
    Path("run.yaml").write_text(
        "model: {model_name_or_path: model}\nrewards: {reward_funcs: [exact_match]}\n"
        "data: {dataset_name: [a/rows.jsonl, {name: b/rows.parquet}]}\n"
        "train: {output_dir: run, prompts_per_step: 2}\n"
    )
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "train data a/rows.jsonl + b/rows.parquet: 6 rows, of which the first of each entry were read." in printed
    assert "length: 3 optimizer steps." in printed
    Path("b/x.png").unlink()
    assert cli.main(["train", "run.yaml", "--dry-run"]) == 2
    assert "b/rows.parquet, row 0, column images, x.png" in capsys.readouterr().err


# --- draws


def sampler(*shares: tuple[int, float], per_step: int = 1, shuffle: bool = True, **settings: Any) -> PromptSampler:
    num_rows = sum(rows for rows, _ in shares)
    return PromptSampler(num_rows, per_step, 0, shuffle, shares=[Share(*share) for share in shares], **settings)


def steps(drawn_by: PromptSampler, num: int) -> list[Draw]:
    return [draw for _ in range(num) for draw in drawn_by.next_step()]


def test_draws_by_weight_unshuffled():
    # 4 rows 0 1 2 3 and 2 rows 4 5 with equal weights: six draws an epoch, three of each source, in turn.
    draws = steps(sampler((4, 1), (2, 1), shuffle=False), 12)
    assert draws == [
        (0, 0), (0, 4), (0, 1), (0, 5), (0, 2), (1, 4),
        (0, 3), (1, 5), (1, 0), (2, 4), (1, 1), (2, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "num_epochs", "expected"),
    [
        ([(4, 3), (4, 1)], 1, [6, 2]),  # 8 draws, 3/4 and 1/4 of them
        ([(4, 3), (4, 1)], 5, [30, 10]),
        ([(90, 0.2), (10, 0.8)], 1, [20, 80]),
        ([(5, 1), (5, 1), (2, 2)], 3, [9, 9, 18]),  # 36 draws
        ([(3, 1), (1, 1), (1, 1)], 3, [5, 5, 5]),
        ([(2, 5), (2, 2), (2, 1)], 1, [4, 1, 1]),  # times 0.1 0.3 0.5 0.7, 0.25, 0.5; the seventh would be b at 0.75
    ],
)
def test_each_source_has_its_share_of_an_epochs_draws(shares, num_epochs, expected):
    num_rows = sum(rows for rows, _ in shares)
    borders = [sum(rows for rows, _ in shares[: i + 1]) for i in range(len(shares))]
    rows = [draw.row for draw in steps(sampler(*shares), num_epochs * num_rows)]
    counts = Counter(next(i for i, border in enumerate(borders) if row < border) for row in rows)
    assert [counts[i] for i in range(len(shares))] == expected


@pytest.mark.parametrize("shares", [[(7, 1), (3, 5)], [(2, 1), (9, 0.3), (4, 2)]])
def test_every_row_of_a_source_is_drawn_before_any_is_repeated(shares):
    draws, start = steps(sampler(*shares), 200), 0
    assert len(set(draws)) == 200  # no two draws share random numbers
    orders = set()
    for num_rows, _ in shares:
        of_source = [draw for draw in draws if start <= draw.row < start + num_rows]
        for epoch in range(of_source[-1].epoch):
            rows = [draw.row for draw in of_source if draw.epoch == epoch]
            assert sorted(rows) == list(range(start, start + num_rows))
            orders.add(tuple(rows))
        assert [draw.epoch for draw in of_source] == sorted(draw.epoch for draw in of_source)
        start += num_rows
    assert len(orders) > len(shares)


def test_a_run_resumed_within_an_epoch_draws_the_same():
    shares = [(7, 1), (3, 5)]
    whole = sampler(*shares, per_step=4)
    expected = steps(whole, 40)
    begun = sampler(*shares, per_step=4)
    steps(begun, 21)  # 84 of 10 draws an epoch
    resumed = sampler(*shares, per_step=4)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert steps(resumed, 19) == expected[84:]


def test_ranks_divide_the_draws_of_a_mixture():
    ranks = [sampler((7, 1), (3, 5), per_step=4, rank=rank, world_size=2) for rank in range(2)]
    assert [draw for rank in ranks for draw in rank.next_step()] == sampler((7, 1), (3, 5), per_step=4).next_step()


def test_changed_weights_are_refused():
    state = sampler((4, 1), (2, 1)).state_dict()
    with pytest.raises(CheckpointError, match="shares"):
        sampler((4, 1), (2, 3)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="shares"):
        PromptSampler(6, 1, 0).load_state_dict(state)


def test_a_checkpoint_from_before_mixtures_can_be_resumed():
    state = PromptSampler(6, 1, 0).state_dict() | {"cursor": 4}
    del state["shares"]
    resumed = PromptSampler(6, 1, 0)
    resumed.load_state_dict(state)
    assert resumed.cursor == 4


def test_shares_count_the_rows_that_are_used():
    Path("c.jsonl").write_text('{"prompt": "c0"}\n{"prompt": ""}\n')
    entries = [{"name": "a/rows.jsonl", "weight": 1}, {"name": "c.jsonl", "weight": 2}]
    usable = check_rows(load(*entries, on_bad_row="drop"), [], Ranks())
    assert usable.shares() == [(4, 1), (1, 2)]
    assert check_rows(load(), [], Ranks()).shares() == []
    with pytest.raises(DataError, match=r"c\.jsonl: none of its rows can be used, and it has weight 2"):
        usable.without([long_row(usable.rows, 4, num_tokens=9, limit=8)]).shares()


def test_an_example_may_be_from_a_later_source(monkeypatch):
    monkeypatch.setattr("rl_vlm.data.check.EXAMPLES", 1)
    usable = check_rows(load(), [], Ranks())
    assert usable.example(["solution"]).prompt == "a0"
    assert usable.example(["level"]).prompt == "b0"
    assert usable.example([], lambda row: row["data_source"] == "b/rows.parquet").prompt == "b0"


def test_a_reward_may_need_a_column_of_one_source():
    Path("mine.py").write_text("def f(completions, level): return []")
    with RewardSuite(RewardsConfig(reward_funcs=["mine.py:f"])) as rewards:
        rewards.check_columns(load().columns)
