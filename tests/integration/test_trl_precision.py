"""The table of docs/migrate.md about `bf16` and `dtype`, held against TRL and against what a run makes of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rl_vlm.errors import ConfigError
from rl_vlm.grpo_trainer import GRPOTrainer

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
ROW = re.compile(r"\| `(true|false)` \| `(\{.*\})` \| (\S+) \| (\S+) \| (\S+) \|")
ROWS = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines() if line.startswith(("| `true` |", "| `false` |"))]
TABLE = [(row[1] == "true", yaml.safe_load(row[2]), *row.groups()[2:]) for row in ROWS if row]


def as_torch(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(torch, value) if value in ("float32", "bfloat16") else value for name, value in kwargs.items()
    }


def test_the_table_is_whole():
    assert all(ROWS) and len(TABLE) == 17
    assert {bf16 for bf16, *_ in TABLE} == {True, False}


@pytest.mark.parametrize("form", [lambda kwargs: kwargs, as_torch], ids=["names", "torch"])
@pytest.mark.parametrize(("bf16", "kwargs", "weights", "computed", "ours"), TABLE)
def test_what_a_run_makes_of_both_settings(bf16, kwargs, weights, computed, ours, form):
    from trl.trainer.grpo_config import GRPOConfig

    def trainer(**given: Any) -> GRPOTrainer:
        return GRPOTrainer("some/model", **given)

    given = {"bf16": bf16, "model_init_kwargs": form(kwargs)}
    config = GRPOConfig(output_dir="x", use_cpu=True, report_to=[], **given)
    flat = {"output_dir": "x", "bf16": bf16, "model_init_kwargs": form(kwargs)}
    if ours == "refused":
        for call in ({"args": config}, {"args": flat}, given):
            with pytest.raises(ConfigError, match=r"`(bf16|model_init_kwargs)` is .*dtype"):
                trainer(**call)
        return
    for call in ({"args": config}, {"args": flat}, given, {"args": {"output_dir": "x"}, **given}):
        assert trainer(**call).config.model.dtype == ours
    if bf16:
        for left_out in ({"args": {"output_dir": "x", "model_init_kwargs": form(kwargs)}},
                         {"args": flat | {"bf16": None}}):  # fmt: skip
            assert trainer(**left_out).config.model.dtype == ours


@pytest.mark.parametrize(("settings", "ours"), [
    ("dtype: auto", "bfloat16"), ("dtype: float32\nbf16: false", "float32"),
    ("dtype: bfloat16\nbf16: false", "bfloat16"),
    ("dtype: auto\nbf16: false", None), ("dtype: float16", None), ("fp16: true", None),
])  # fmt: skip
def test_precision_at_the_top_of_a_file(settings, ours):
    args = {"output_dir": "x", **yaml.safe_load(settings)}
    if ours:
        assert GRPOTrainer("some/model", args=args).config.model.dtype == ours
    else:
        with pytest.raises(ConfigError, match=r"`(bf16|dtype|fp16)` is "):
            GRPOTrainer("some/model", args=args)


def test_the_table_says_what_trl_does(tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer as Oracle

    from tests.tiny.build import build_tiny

    checkpoint = build_tiny("qwen2_5_vl", tmp_path / "tiny")
    AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(checkpoint)
    rows = Dataset.from_list([{"prompt": "unused"}] * 2)
    for bf16, kwargs, weights, computed, _ in TABLE:
        for form in (dict, as_torch):
            args = GRPOConfig(
                output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], num_generations=2,
                per_device_train_batch_size=2, bf16=bf16, model_init_kwargs=form(kwargs),
            )  # fmt: skip
            trainer = Oracle(str(checkpoint), reward_funcs=lambda **_: [0.0], args=args, train_dataset=rows)
            assert trainer.model is not None
            loaded = {parameter.dtype for parameter in trainer.model.parameters()}
            with trainer.accelerator.autocast():
                is_cast = torch.is_autocast_enabled("cpu")
                found = {torch.get_autocast_dtype("cpu")} if is_cast else loaded
            names = [text.replace("checkpoint's", "bfloat16") for text in (weights, computed)]
            assert [loaded, found] == [{getattr(torch, name)} for name in names], (bf16, kwargs)
