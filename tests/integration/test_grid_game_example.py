"""`configs/grid_game.yaml` plays whole games, and trains on them."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from launch import cli

pytestmark = pytest.mark.slow


def test_a_run_starts_from_random_games(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    settings = [f"output_dir={tmp_path}", "max_steps=2", "eval_steps=0", "save_steps=0", "prompts_per_step=8"]
    settings += ["eval_dataset_name=null", "disable_tqdm=true", "report=false"]
    assert cli.run("train", ["configs/grid_game.yaml", *settings]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["compute/shared_forwards"] > 0 and "compute/dense_forwards" not in line for line in lines)
    assert lines[0]["environment/failed_steps"] < 0.1
    rows = pyarrow.parquet.read_table(next((tmp_path / "completions").glob("completions_*.parquet"))).to_pylist()
    assert all(row["fault"] is None for row in rows)
    reasons = Counter(row["finish_reason"] for row in rows)
    assert reasons.keys() <= {"stop", "turns", "length"}
    assert reasons["stop"] and reasons["turns"]
    assert reasons["length"] < 0.05 * len(rows)  # a random model rarely leaves the end of the turn out
    solved = [row for row in rows if row["solved"] == 1]
    assert 0 < len(solved) < 0.5 * len(rows)
