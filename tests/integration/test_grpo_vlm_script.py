"""A script with the calls of TRL's `examples/scripts/grpo_vlm.py`, over a stand-in of the hub and a tiny model.

It differs from one for TRL in the import of GRPOTrainer. Its rows are those of tiny_run.
"""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.helpers.hub_server import hub_server
from tests.helpers.tiny_run import metric_lines

SCRIPT = """
import torch
from datasets import Dataset
from trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import think_format_reward

from rl_vlm import GRPOTrainer
from tests.helpers import tiny_run


def with_messages(row):
    asked = [{"role": "system", "content": "Think first."}, {"role": "user", "content": row["problem"]}]
    return {"prompt": asked}


def has_small_image(row):
    return max(row["image"].size) < 512


def in_rgb(row):
    return {**row, "image": row["image"].convert("RGB")}


def main(script_args, training_args, model_args):
    precision = model_args.dtype if model_args.dtype in ["auto", None] else getattr(torch, model_args.dtype)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": precision,
    }
    rows = [{"problem": row["prompt"], "image": row["image"], "solution": row["solution"]} for row in tiny_run.rows()]
    dataset = Dataset.from_list(rows).train_test_split(test_size=4, seed=42)
    dataset = dataset.map(with_messages).filter(has_small_image).map(in_rgb)

    def accuracy_reward(completions, solution, **_):
        contents = [completion[0]["content"] for completion in completions]
        return [float(text.strip() == gold) for text, gold in zip(contents, solution)]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward, accuracy_reward],
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config())
"""


def test_the_script_trains_saves_and_pushes(tiny_checkpoint: Path, tmp_path: Path):
    (tmp_path / "grpo_vlm.py").write_text(SCRIPT)
    options = {
        "model_name_or_path": tiny_checkpoint, "output_dir": tmp_path / "run", "learning_rate": 1e-5,
        "max_completion_length": 6, "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "dtype": "bfloat16", "report_to": "none", "use_cpu": True,
        "push_to_hub": True, "hub_model_id": "owner/mine", "hub_token": "hf_secret", "log_completions": True,
    }  # fmt: skip
    command = [sys.executable, str(tmp_path / "grpo_vlm.py"), "--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with hub_server() as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metric_lines(tmp_path / "run")] == [1, 2]
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["model"]["lora_target_modules"] == ["q_proj", "v_proj"] and settings["model"]["lora_r"] == 16
    assert settings["train"]["learning_rate"] == 1e-5 and settings["model"]["dtype"] == "bfloat16"
    assert "`lora_dropout` 0.05 is left out" in done.stderr and "push_to_hub ignores dataset_name" in done.stderr
    assert len(hub.commits) == 2  # by train() with `push_to_hub`, and by the call
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= hub.commits[-1][2].keys()
