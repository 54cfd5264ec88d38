"""What a flat file leaves out has TRL's default."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config import trl_fields
from rl_vlm.config.load import FULL_NAMES, load_config
from rl_vlm.config.schema import SETTINGS
from rl_vlm.config.trl_defaults import ALWAYS, is_flat, trl_defaults

OURS = "model: {model_name_or_path: tiny}\n"
FLAT = "model_name_or_path: tiny\n"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str, *overrides: str) -> dict[str, Any]:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        config = load_config(path, overrides).model_dump()
        return {leaf: value for section in config.values() for leaf, value in section.items()}

    return load


def trl_default_values() -> dict[str, Any]:
    """The default of every field of the installed TRL."""
    trl = pytest.importorskip("trl", reason="needs trl to list its defaults")
    from trl.scripts.grpo import GRPOScriptArguments

    return {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for arguments in (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments)
        for field in dataclasses.fields(arguments)
    }


MEANS_OURS = {
    "attn_implementation": "sdpa",  # transformers' choice
    "chat_template_kwargs": {}, "lr_scheduler_kwargs": {}, "disable_tqdm": False, "report_to": [],
    "vllm_importance_sampling_clip_min": 0.0, "vllm_server_base_url": [],
    "eval_steps": 0,  # `eval_strategy` is "no"
    "gradient_accumulation_steps": None, "per_device_train_batch_size": None,  # 1 and 8, in `batch_sizes`
    "greater_is_better": True,
    "vllm_server_timeout": 1800.0,  # here it includes the start of a server
}  # fmt: skip
"""Settings whose default here is what TRL makes of its own, which looks different."""

IN_SOME_RUNS = {"logging_steps", "vllm_model_impl", "num_generations_eval", "num_completions_to_print"}
"""Settings whose default of TRL holds, or is noted, if the run reads them."""


def test_every_default_of_trl_that_differs_is_taken():
    trl = trl_default_values()
    ours = {name: SETTINGS[FULL_NAMES[name]].default for name in trl_fields.SAME}
    assert {name: ours[name] for name in MEANS_OURS} == MEANS_OURS
    differing = {
        name: trl[name] for name in trl_fields.SAME - MEANS_OURS.keys() - IN_SOME_RUNS if trl[name] != ours[name]
    }
    del differing["model_name_or_path"]  # required in both
    assert trl["output_dir"] is None and trl["bf16"] is None
    differing |= {
        "output_dir": "trainer_output",
        "dtype": "bfloat16",
    }  # what TrainingArguments and GRPOConfig make of it
    assert {FULL_NAMES[name]: value for name, value in differing.items()} == ALWAYS


def test_trl_itself_makes_these_of_its_defaults(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="needs trl")
    monkeypatch.chdir(tmp_path)
    arguments = trl.GRPOConfig(use_cpu=True)
    assert (arguments.output_dir, arguments.bf16, arguments.eval_strategy.value) == ("trainer_output", True, "no")


def test_fields_without_a_default_here_have_trls(load):
    trl = trl_default_values()
    assert (trl["eval_strategy"], trl["save_strategy"], trl["use_vllm"], trl["max_steps"]) == ("no", "steps", False, -1)
    found = load(FLAT)
    assert (found["eval_steps"], found["save_steps"], found["engine"], found["max_steps"]) == (0, 500, "hf", None)


@pytest.mark.parametrize(
    ("text", "name", "flat", "ours"),
    [
        ("", "num_train_epochs", 3.0, 1.0),
        ("", "eval_on_start", False, True),
        ("", "log_completions", False, True),
        ("", "gradient_checkpointing", True, False),
        ("", "output_dir", "trainer_output", "runs/default"),
        ("", "dtype", "bfloat16", None),
        ("", "logging_steps", 1, 1),
        ("report_to: wandb", "logging_steps", 10, 1),
        ("report_to: wandb\nlogging_steps: 10", "logging_steps", 10, 10),
        ("", "vllm_model_impl", "auto", "auto"),
        ("engine: vllm", "vllm_model_impl", "vllm", "auto"),
        ("", "num_generations_eval", 1, 1),
        ("eval_dataset_name: d\nnum_generations: 4\ntemperature: 0.7", "num_generations_eval", 4, 1),
        ("eval_dataset_name: d\nnum_generations: 4\ntemperature: 0.7", "eval_temperature", 0.7, 0.0),
        ("", "loss_normalizer", "window", "step"),
        ("loss_type: grpo", "loss_normalizer", "step", "step"),
        ("num_train_epochs: 2", "num_train_epochs", 2.0, 2.0),
        ("num_train_epochs: null", "num_train_epochs", 3.0, 1.0),
    ],
)
def test_defaults_of_flat_files_and_of_files_with_sections(load, text, name, flat, ours):
    assert load(f"{FLAT}{text}\n")[name] == flat
    assert load(f"{OURS}{text}\n")[name] == ours


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("", "bfloat16"),
        ("dtype: float32", "bfloat16"),  # the weights' in TRL, which computes in bfloat16
        ("dtype: float32\nbf16: true", "bfloat16"),
        ("bf16: false", "float32"),
        ("dtype: float32\nbf16: false", "float32"),
        ("dtype: bfloat16\nbf16: false", "bfloat16"),
        ("model_init_kwargs: {dtype: bfloat16}\nbf16: false", "bfloat16"),
    ],
)
def test_the_precision_of_a_flat_file_is_trls(load, text, dtype):
    assert load(f"{FLAT}{text}\n")["dtype"] == dtype


def test_overrides_do_not_decide_what_a_file_is(load):
    assert load(FLAT, "train.num_train_epochs=2", "memory.micro_batch_tokens=9")["eval_on_start"] is False
    assert load(OURS, "num_train_epochs=2")["eval_on_start"] is True
    assert load(FLAT, "num_train_epochs=null")["num_train_epochs"] == 3.0
    assert load(FLAT, "eval_on_start=true", "eval_dataset_name=d")["eval_on_start"] is True


@pytest.mark.parametrize(
    ("keys", "flat"),
    [(["seed"], True), (["trian"], True), ([], False), (["seed", "train"], False), (["train.seed", "beta"], False)],
)
def test_a_flat_file_has_no_sections(keys, flat):
    assert is_flat(keys) is flat


def test_the_log_names_the_defaults_that_hold_and_those_that_cannot(load, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    load(f"{FLAT}use_peft: true\nload_best_model_at_end: true\neval_dataset_name: d\neval_steps: 5\nlogging_steps: 7\n")
    (message,) = caplog.messages
    for part in (
        "has no sections, so what it leaves out has TRL's default: ", "num_train_epochs 3.0", "eval_on_start false",
        "`logging_steps` 7 is left out", "`lora_dropout` is 0.05 in TRL", "`lora_target_modules` is PEFT's choice",
        "`metric_for_best_model` is the held-out loss",
    ):  # fmt: skip
        assert part in message
    caplog.clear()
    load(OURS)
    monkeypatch.setenv("RANK", "1")
    load(FLAT)
    assert caplog.messages == []


def test_the_page_on_migration_lists_the_defaults():
    page = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| .* \| .* \|$", page.partition("**Converted")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    every = "report_to: wandb\nengine: vllm\neval_dataset_name: d\n"
    taken = trl_defaults({FULL_NAMES[line.split(":")[0]]: line.split(": ")[1] for line in every.splitlines()})
    assert named == {name.split(".")[1] for name in taken}
