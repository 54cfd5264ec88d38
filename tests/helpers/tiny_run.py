"""A run of seconds: 12 small images with one-word answers, and rewards that a random model gets now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import RunConfig
from tests.tiny.build import build_tiny

NUM_ROWS = 12
ROWS = f"{__name__}:rows"
HELD_OUT_ROWS = f"{__name__}:held_out_rows"
TOKEN_SUM = f"{__name__}:token_sum"
COIN = f"{__name__}:coin"
CONSTANT = f"{__name__}:constant"


def rows() -> list[dict[str, Any]]:
    return [
        {"id": f"row-{i}", "prompt": "Which digit is this?", "image": noise(i), "solution": str(i % 10)}
        for i in range(NUM_ROWS)
    ]


def held_out_rows() -> list[dict[str, Any]]:
    return [{**row, "id": f"held-out-{i}", "image": noise(100 + i)} for i, row in enumerate(rows()[:5])]


def noise(seed: int) -> Image.Image:
    pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def token_sum(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between almost all completions."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def coin(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward from global random generators; not from Python's, which beartype draws from as well."""
    return [np.random.rand() + torch.rand(()).item() for _ in completion_ids]


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


def build_checkpoint(directory: Path) -> Path:
    """A random Qwen2.5-VL whose completions end at one token in ten: 40 byte tokens are stop tokens as well."""
    build_tiny("qwen2_5_vl", directory, hidden_size=48)
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text())
    first_byte = 7  # behind the special tokens
    settings["eos_token_id"] = [settings["eos_token_id"], *range(first_byte, first_byte + 40)]
    path.write_text(json.dumps(settings))
    return directory


def make_config(checkpoint: str | Path, output_dir: Path, **settings: Any) -> RunConfig:
    """The tiny run; `settings` are leaves by name, such as `max_steps=4`."""
    given = {"model_name_or_path": str(checkpoint), "output_dir": str(output_dir), **settings}
    values: dict[str, dict[str, Any]] = {}
    for leaf, value in (DEFAULTS | given).items():
        section, _ = FULL_NAMES[leaf].split(".")
        values.setdefault(section, {})[leaf] = value
    return RunConfig.model_validate(values)


DEFAULTS: dict[str, Any] = {
    "dataset_name": ROWS,
    "reward_funcs": [TOKEN_SUM],
    "num_generations": 4,
    "max_completion_length": 6,
    "prompts_per_step": 2,
    "max_steps": 4,
    "save_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "disable_tqdm": True,
    "report": False,
    "micro_batch_tokens": 8192,  # `auto` would take a second to plan each run
}


def metric_lines(output_dir: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without times, what is computed from them, and the memory that the process holds."""
    lines = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "data_wait_fraction", "environment/engine_wait_fraction", "balance/seconds", "memory/held")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def completions(output_dir: Path, of: str = "completions") -> dict[str, list[dict[str, Any]]]:
    """The rows of each window's file, or of each `held_out` one, by its name, without the seconds of calls."""
    paths = sorted((output_dir / "completions").glob(f"{of}_*.parquet"))
    return {path.name: list(map(without_seconds, pyarrow.parquet.read_table(path).to_pylist())) for path in paths}


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a completions file without the times that calls of tools took."""
    turns = json.loads(row.get("turns") or "[]")
    for result in (result for turn in turns for result in turn["results"]):
        result.pop("seconds")
    return row | ({"turns": json.dumps(turns)} if turns else {})


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's files, under the names that files use."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def model_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's model, under the names that its modules use."""
    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
