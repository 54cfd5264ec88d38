"""What an evaluation writes: chunks to go on from, references to images, and the rows that are kept to train on."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.evaluation.difficulty import success_rates, write_selected_rows
from rl_vlm.evaluation.directory import Chunk, EvaluationDirectory
from rl_vlm.evaluation.options import SuccessRange, success_range
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import Sample

FIRST = Chunk([{"row": 0, "reward": 0.1}, {"row": 1, "reward": None}], {"exact_match/nan": 1})
SECOND = Chunk([{"row": 2, "reward": 1.0}], {})


def directory(path: Path) -> EvaluationDirectory:
    return EvaluationDirectory(path / "evaluation", path / "evaluation" / "images")


def test_an_evaluation_with_the_same_settings_goes_on(tmp_path):
    settings = {"model": ("a", 1), "seed": 0}
    assert directory(tmp_path).resume(settings) == []
    kept = [directory(tmp_path).write_chunk(chunk) for chunk in (SECOND, FIRST)]
    assert kept == [SECOND, FIRST]
    assert directory(tmp_path).resume(settings) == [FIRST, SECOND]


def test_torn_files_are_not_read(tmp_path):
    directory(tmp_path).resume({})
    directory(tmp_path).write_chunk(FIRST)
    (tmp_path / "evaluation" / "unfinished" / "row_000000002.tmp").write_text('{"rows": [')
    assert directory(tmp_path).resume({}) == [FIRST]


def test_other_settings_start_anew_and_say_why(tmp_path, caplog):
    directory(tmp_path).resume({"model": "a", "seed": 0})
    directory(tmp_path).write_chunk(FIRST)
    assert directory(tmp_path).resume({"model": "b", "seed": 0}) == []
    assert "is of another model: starting over" in caplog.text
    assert directory(tmp_path).resume({"model": "b", "seed": 0}) == []


def test_a_finished_evaluation_is_not_taken_again(tmp_path):
    directory(tmp_path).resume({})
    directory(tmp_path).write_chunk(FIRST)
    directory(tmp_path).delete_unfinished()
    assert directory(tmp_path).resume({}) == []


def test_what_reward_functions_logged_is_kept_as_text_where_json_has_no_type_for_it(tmp_path):
    directory(tmp_path).resume({})
    assert directory(tmp_path).write_chunk(Chunk([{"row": 0, "note": {1, 2}}], {})).rows == [
        {"row": 0, "note": "{1, 2}"}
    ]


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(256, size=(4, 6, 3), dtype=np.uint8))


def of_images(*images: Image.Image) -> Sample:
    return Sample("row", [], list(images), {}, "")


def test_small_copies_of_images_are_written_once(tmp_path):
    files, scan, other = directory(tmp_path), Image.new("RGB", (900, 600), "red"), noise(1)
    names = files.images.write(of_images(scan, other))["images"]
    assert files.images.write(of_images(scan.copy())) == {"images": names[:1]}
    assert files.images.write(of_images()) == {"images": []}
    written = [files.path / name for name in names]
    assert sorted((files.path / "images").iterdir()) == sorted(written)
    assert [Image.open(path).size for path in written] == [(448, 299), other.size]


def scored(*scores: tuple[int, float | None]) -> list[dict[str, Any]]:
    return [{"row": row, "accuracy": score} for row, score in scores]


def test_success_rate_is_the_share_of_scored_completions_that_reach_1():
    completions = scored((0, 1.0), (0, 0.9), (1, 1.0), (1, None), (2, None), (3, 0.0), (3, 2.0), (3, 1.0), (3, -1.0))
    assert success_rates(completions, "accuracy") == {0: 0.5, 1: 1.0, 3: 0.5}


def test_the_function_with_the_largest_weight_decides(tmp_path):
    specs: Any = [{"function": "format_tags", "weight": 0.2}, "exact_match"]
    with RewardSuite(RewardsConfig(reward_funcs=specs)) as suite:
        assert success_range(0.1, 0.9, None, suite, 4) == SuccessRange(0.1, 0.9, "exact_match")
        assert success_range(0.1, 0.9, "format_tags", suite, 4).function == "format_tags"
        with pytest.raises(ConfigError, match=r"--keep-by accuracy: .* there are format_tags, exact_match"):
            success_range(0.1, 0.9, "accuracy", suite, 4)
        with pytest.raises(ConfigError, match="a success rate is one of 0, 1/2, 1; sample more"):
            success_range(0.6, 0.9, None, suite, 2)
    with (
        RewardSuite(RewardsConfig(reward_funcs=["choice", "exact_match"])) as suite,
        pytest.raises(ConfigError, match=r"choice, exact_match have the same weight; .* --keep-by"),
    ):
        success_range(0.1, 0.9, None, suite, 4)


def image_file(path: Path, seed: int) -> str:
    noise(seed).save(path)
    return path.name


def jsonl_rows(folder: Path) -> str:
    rows = [
        {"id": f"r{i}", "prompt": "Which?", "image": image_file(folder / f"{i}.png", i), "solution": str(i)}
        for i in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def parquet_rows(folder: Path) -> str:
    """Several images a row, messages, and a column that rewards alone read."""
    content = [{"type": "image", "text": None}, {"type": "text", "text": "Same?"}]
    data = {
        "prompt": [[{"role": "user", "content": [content[0], *content]}]] * 4,
        "images": [[noise(2 * i), noise(2 * i + 1)] for i in range(4)],
        "boxes": [[[i, 1], [2, 3]] for i in range(4)],
    }
    path = str(folder / "rows.parquet")
    datasets.Dataset.from_dict(data).cast_column("images", datasets.List(datasets.Image())).to_parquet(path)
    return path


@pytest.mark.parametrize("make", [jsonl_rows, parquet_rows])
def test_kept_rows_load_for_training_as_they_were(make, tmp_path):
    rows = load_rows(DataConfig(eval_dataset_name=make(tmp_path)), "eval")
    completions = scored((0, 1.0), (0, 1.0), (1, 0.0), (1, 1.0), (2, 0.0), (2, 0.0), (3, 1.0), (3, 0.0))
    path = tmp_path / "elsewhere" / "kept.parquet"
    path.parent.mkdir()
    assert write_selected_rows(path, rows, completions, SuccessRange(0.1, 0.9, "accuracy")) == 2
    assert [file.name for file in path.parent.iterdir()] == ["kept.parquet"]

    kept = load_rows(DataConfig(dataset_name=str(path)), "train")
    assert len(kept) == 2
    for found, expected in zip(kept, (rows[1], rows[3]), strict=True):
        assert found.columns.pop("success_rate") == 0.5
        assert (found.columns, found.messages, found.prompt) == (expected.columns, expected.messages, expected.prompt)
        assert [np.array(i).tolist() for i in found.images] == [np.array(i).tolist() for i in expected.images]


def test_kept_rows_load_with_the_settings_of_the_data_that_they_come_from(tmp_path):
    settings: Any = {"columns": {"question": "prompt", "prompt": "id", "solution": "image", "image": "photo"}}
    rows = [{"id": f"Which? {i}", "prompt": "", "photo": image_file(tmp_path / f"{i}.png", i), "image": str(i)}
            for i in range(2)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = load_rows(DataConfig(eval_dataset_name=str(tmp_path / "rows.jsonl"), **settings), "eval")
    path = tmp_path / "kept.parquet"
    write_selected_rows(path, held_out, scored((0, 1.0), (1, 1.0)), SuccessRange(1.0, 1.0, "accuracy"))
    (first, second) = load_rows(DataConfig(dataset_name=str(path), **settings), "train")
    assert (first.prompt, first.columns) == ("Which? 0", {"question": "", "solution": "0", "success_rate": 1.0})
    assert np.array(second.images[0]).tolist() == np.array(noise(1)).tolist()


def test_without_a_row_to_keep_there_is_no_file(tmp_path):
    rows = load_rows(DataConfig(eval_dataset_name=jsonl_rows(tmp_path)), "eval")
    (tmp_path / "kept.parquet").write_text("of an earlier evaluation")
    assert (
        write_selected_rows(tmp_path / "kept.parquet", rows, scored((0, 1.0)), SuccessRange(0.0, 0.5, "accuracy")) == 0
    )
    assert not (tmp_path / "kept.parquet").exists()


def test_rows_without_common_types_are_refused_by_name(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "x": 1}\n{"prompt": "b", "x": [1]}\n')
    rows = load_rows(DataConfig(eval_dataset_name=str(tmp_path / "rows.jsonl")), "eval")
    with pytest.raises(DataError, match=r"rows\.jsonl: its rows cannot be written to .*kept\.parquet"):
        write_selected_rows(
            tmp_path / "kept.parquet", rows, scored((0, 1.0), (1, 1.0)), SuccessRange(0.5, 1.0, "accuracy")
        )
