from pathlib import Path

import pytest

from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.trl_fields import translate
from rl_vlm.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"


def changed(config: RunConfig) -> dict[str, object]:
    """Settings that differ from their defaults, by leaf name."""
    default = RunConfig.model_validate({"model": {"model_name_or_path": ""}}).model_dump()
    return {
        leaf: value
        for section, settings in config.model_dump().items()
        for leaf, value in settings.items()
        if value != default[section][leaf]
    }


def test_a_trl_file_loads():
    assert changed(load_config(DATA / "trl_loads.yaml")) == {
        "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct",
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 64,
        "lora_alpha": 128,
        "dataset_name": "lmms-lab/multimodal-open-r1-8k-verified",
        "reward_funcs": ["trl.rewards:think_format_reward", "my_lib.rewards:accuracy"],
        "reward_weights": [0.5, 1.0],
        "max_completion_length": 1024,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "output_dir": "runs/qwen",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 2.0,
        "max_steps": 100,
        "save_steps": 50,
        "seed": 7,
        "gradient_checkpointing": True,
        "logging_steps": 10,
    }


def test_a_trl_file_with_other_names_loads():
    assert changed(load_config(DATA / "trl_converted.yaml")) == {
        "model_name_or_path": "Qwen/Qwen2-VL-2B-Instruct",
        "dtype": "bfloat16",
        "use_peft": True,
        "dataset_name": "my/data",
        "eval_dataset_name": "my/data",
        "dataset_test_split": "validation",
        "reward_funcs": ["trl.rewards:accuracy_reward"],
        "num_generations": 4,
        "warmup_steps": 0.1,
        "scale_rewards": "none",
        "save_steps": 0,
        "eval_steps": 20,
        "resume_from_checkpoint": "auto",
        "report_to": ["tensorboard"],
    }


def test_a_trl_file_is_refused_with_every_missing_field_named():
    with pytest.raises(ConfigError) as error:
        load_config(DATA / "trl_refused.yaml")
    assert [line.split("`")[1] for line in str(error.value).splitlines()] == [
        "use_vllm",
        "vllm_mode",
        "vllm_gpu_memory_utilization",
        "fp16",
        "load_in_4bit",
        "lora_dropout",
        "eval_strategy",
        "push_to_hub",
        "deepspeed",
        "max_tool_calling_iterations",
        "algorithm.loss_type",
    ]
    assert "'luspo': it should be 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo' or 'sapo'" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("use_vllm", False, {}),
        ("fp16", None, {}),
        ("bf16", False, {}),
        ("optim", "adamw_torch", {}),
        ("torch_dtype", "bfloat16", {"dtype": "bfloat16"}),
        ("evaluation_strategy", "no", {"eval_steps": 0}),
        ("eval_strategy", False, {"eval_steps": 0}),  # what YAML makes of a bare `no`
        ("eval_strategy", "steps", {"eval_steps": 10}),
        ("save_strategy", "steps", {}),
        ("scale_rewards", True, {"scale_rewards": "group"}),
        ("max_steps", 7, {"max_steps": 7}),
        ("reward_funcs", ["file.py:f"], {"reward_funcs": ["file.py:f"]}),
        ("no_such_field", 1, None),
    ],
)
def test_translate(name, value, expected):
    assert translate(name, value, {name: value}) == expected


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy"])
def test_epochs_are_refused(name):
    with pytest.raises(ValueError, match="counted in steps"):
        translate(name, "epoch", {})


def test_bf16_beside_float32_is_a_contradiction(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: tiny\nbf16: true\ndtype: float32\n")
    with pytest.raises(ConfigError, match=r"`bf16` and `dtype` both set `model\.dtype`"):
        load_config(path)
