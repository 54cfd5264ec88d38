from pathlib import Path

import pytest

from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.trl_fields import translate
from rl_vlm.errors import ConfigError

DATA = Path(__file__).parents[2] / "data"


def changed(config: RunConfig) -> dict[str, object]:
    """Settings that differ from their defaults, by leaf name."""
    default = RunConfig.model_validate({"model": {"model_name_or_path": "default"}}).model_dump()
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
        "load_in_4bit": True,
        "use_bnb_nested_quant": True,
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
        "eval_on_start": False,
        "loss_normalizer": "window",
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
        "engine": "vllm_server",
        "vllm_server_base_url": ["http://127.0.0.1:8123"],
        "vllm_server_timeout": 600.0,
        "vllm_importance_sampling_clip_max": 2.0,
        # TRL's defaults
        "output_dir": "trainer_output",
        "num_train_epochs": 3.0,
        "eval_on_start": False,
        "num_generations_eval": 4,
        "eval_temperature": 1.0,
        "gradient_checkpointing": True,
        "log_completions": False,
        "logging_steps": 10,
        "loss_normalizer": "window",
    }


def test_a_trl_file_is_refused_with_every_missing_field_named():
    with pytest.raises(ConfigError) as error:
        load_config(DATA / "trl_refused.yaml")
    assert [line.split("`")[1] for line in str(error.value).splitlines()] == [
        "vllm_server_host",
        "vllm_group_port",
        "vllm_structured_outputs_regex",
        "off_policy_mask_threshold",
        "fp16",
        "load_in_8bit",
        "lora_dropout",
        "eval_strategy",
        "push_to_hub",
        "deepspeed",
        "max_tool_calling_iterations",
        "algorithm.loss_type",
    ]
    assert "'luspo': it should be 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo' or 'sapo'" in str(error.value)


OVERLONG = {"max_completion_length": 1280, "soft_punish_cache": 256}
"""The lengths of TRL's script."""


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("use_vllm", False, {"engine": "hf"}),
        ("use_vllm", None, {}),
        ("use_vllm", True, {"engine": "vllm"}),
        ("vllm_mode", "colocate", {}),
        ("vllm_server_host", "0.0.0.0", {}),
        ("vllm_server_port", 8000, {}),
        ("vllm_importance_sampling_clip_max", 2.0, {"vllm_importance_sampling_clip_max": 2.0}),
        ("vllm_importance_sampling_clip_max", None, {"vllm_importance_sampling_clip_max": 0}),
        ("vllm_importance_sampling_cap", None, {}),
        ("max_tool_calling_iterations", 1, {"max_turns": 2}),
        ("max_tool_calling_iterations", None, {}),
        ("fp16", None, {}),
        ("bf16", False, {"dtype": "float32"}),
        ("optim", "adamw_torch", {"optim": "adamw_torch"}),
        ("optim", "adamw_torch_fused", {"optim": "adamw_torch"}),
        ("optim", "adamw_bnb_8bit", {"optim": "adamw_8bit"}),
        ("optim", "adafactor", {"optim": "adafactor"}),
        ("torch_dtype", "bfloat16", {"dtype": "bfloat16"}),
        ("evaluation_strategy", "no", {"eval_steps": 0}),
        ("eval_strategy", False, {"eval_steps": 0}),  # what YAML makes of a bare `no`
        ("eval_strategy", "steps", {"eval_steps": 10}),
        ("save_strategy", "steps", {}),
        ("scale_rewards", True, {"scale_rewards": "group"}),
        ("max_steps", 7, {"max_steps": 7}),
        ("reward_funcs", ["file.py:f"], {"reward_funcs": ["file.py:f"]}),
        (
            "reward_funcs",
            ["get_soft_overlong_punishment"],
            {
                "reward_funcs": [
                    {"function": "overlong", "kwargs": {"max_completion_length": 1280, "soft_punish_cache": 256}}
                ]
            },
        ),
        ("no_such_field", 1, None),
    ],
)
def test_translate(name, value, expected):
    assert translate(name, value, {name: value}) == expected


@pytest.mark.parametrize(
    ("name", "value", "beside", "expected"),
    [
        ("generation_batch_size", 64, {"per_device_train_batch_size": 4}, {"steps_per_generation": 16}),
        ("generation_batch_size", 32, {}, {"steps_per_generation": 4}),  # TRL's per-device default is 8
        ("model_init_kwargs", {"torch_dtype": "bfloat16", "revision": "v1"}, {},
         {"dtype": "bfloat16", "model_revision": "v1"}),
        ("model_init_kwargs", {"dtype": "float32", "attn_implementation": "eager"}, {},
         {"attn_implementation": "eager"}),
        ("data_file_paths", "a.jsonl", {}, {"dataset_name": "a.jsonl"}),
        ("image_folders", "images", {}, {"image_root": "images"}),
        ("data_file_paths", "a.jsonl:b.jsonl", {"image_folders": "x:y"},
         {"dataset_name": [{"name": "a.jsonl", "image_root": "x"}, {"name": "b.jsonl", "image_root": "y"}]}),
        ("image_folders", "x:y", {"data_file_paths": "a.jsonl:b.jsonl"},
         {"dataset_name": [{"name": "a.jsonl", "image_root": "x"}, {"name": "b.jsonl", "image_root": "y"}]}),
        ("datasets", [{"path": "owner/a", "name": "main", "split": "dev"}, {"path": "b"},
                      {"path": "json", "data_files": "c.jsonl"}], {},
         {"dataset_name": [{"name": "owner/a", "dataset_config": "main", "split": "dev"},
                           {"name": "b", "split": "train"}, {"name": "c.jsonl"}]}),
        ("test_split_size", None, {}, {}),
        ("streaming", False, {}, {}),
        ("eval_strategy", "steps", {"dataset_name": "owner/a@train", "eval_steps": 5},
         {"eval_steps": 5, "eval_dataset_name": "owner/a"}),
        ("freeze_vision_modules", True, {}, {"freeze_vision_tower": True}),
        ("logging_first_step", True, {}, {}),
    ],
)  # fmt: skip
def test_what_means_the_same_is_converted(name, value, beside, expected):
    assert translate(name, value, {name: value, **beside}) == expected


def test_the_size_of_a_generation_batch_counts_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"generation_batch_size": 64, "per_device_train_batch_size": 4}
    assert translate("generation_batch_size", 64, given) == {"steps_per_generation": 8}


@pytest.mark.parametrize(
    ("name", "value", "beside", "message"),
    [
        ("generation_batch_size", 20, {}, r"multiple of `per_device_train_batch_size` 8 × 1 processes; or give `steps"),
        ("generation_batch_size", 16, {"steps_per_generation": 2}, "keep that alone"),
        ("generation_batch_size", 16, {"prompts_per_step": 2}, "with `prompts_per_step`, give `steps_per_generation`"),
        ("model_init_kwargs", {"max_memory": 1}, {}, "`model.dtype`, `model.attn_implementation`"),
        ("data_file_paths", "a.jsonl:b.jsonl", {"image_folders": "x"}, "should have as many paths"),
        ("image_folders", "x:y", {"data_file_paths": "a.jsonl"}, "should have as many paths"),
        ("datasets", [{"path": "a", "fraction": 0.5}], {}, "leaves rows out in TRL; write `weight`"),
        ("datasets", [{"path": "a", "columns": ["prompt"]}], {}, "write `ignore_columns`"),
        ("datasets", [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}], {}, "with one file in `data_files`"),
        ("datasets", [{"path": "a", "weight": 2}], {}, "an entry has weight; TRL's fields are path, name"),
        ("datasets", "a", {}, "should be a list of mappings"),
        ("test_split_size", 0.1, {}, "name it in `eval_dataset_name`"),
        ("streaming", True, {}, "rows are read by their number"),
        ("eval_strategy", "steps", {"dataset_name": ["a", "b"]}, "give `eval_dataset_name`"),
        (
            "deepspeed",
            "zero3.json",
            {},
            "such as launch/accelerate/zero3.yaml; .* leave it out",
        ),
        ("fsdp", "full_shard", {}, "`accelerate launch --config_file` says how processes share the model"),
        ("neftune_noise_alpha", 5, {}, "noise in the embeddings"),
    ],
)
def test_refusals_say_what_to_write_instead(name, value, beside, message):
    with pytest.raises(ValueError, match=message):
        translate(name, value, {name: value, **beside})


def test_trls_fields_on_the_command_line_are_read_beside_those_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\nvllm_mode: server\nuse_vllm: false\nper_device_train_batch_size: 4\n")
    config = load_config(path, ["use_vllm=true", "generation_batch_size=8"])
    assert (config.rollout.engine, config.vllm.vllm_server_base_url) == ("vllm_server", ["http://127.0.0.1:8000"])
    assert config.train.steps_per_generation == 2


JOINED = {"engine": "vllm_server", "vllm_server_base_url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, JOINED),
        ({"vllm_server_port": 9}, JOINED | {"vllm_server_base_url": "http://127.0.0.1:9"}),
        ({"vllm_server_host": "gpu-7"}, JOINED | {"vllm_server_base_url": "http://gpu-7:8000"}),
        (
            {"vllm_server_host": "gpu-7", "vllm_server_base_url": "https://a:1"},
            JOINED | {"vllm_server_base_url": "https://a:1"},
        ),
        ({"use_vllm": False}, {"engine": "hf"}),
    ],
)
def test_servers_that_trl_joins(beside, expected):
    given = {"use_vllm": True, "vllm_mode": "server"} | beside
    assert translate("use_vllm", given["use_vllm"], given) == expected
    assert translate("vllm_mode", "server", given) == expected
    for name in set(beside) & {"vllm_server_host", "vllm_server_port"}:
        assert translate(name, given[name], given) == expected


@pytest.mark.parametrize(
    ("given", "name", "message"),
    [
        ({"vllm_mode": "server"}, "vllm_mode", "set `use_vllm` too"),
        ({"use_vllm": True, "vllm_mode": "remote"}, "use_vllm", "'remote': it should be 'colocate' or 'server'"),
        ({"vllm_server_port": 9000}, "vllm_server_port", "set them beside it"),
        ({"use_vllm": True, "vllm_server_host": "gpu-7"}, "vllm_server_host", "`vllm_mode: server`"),
    ],
)
def test_a_server_that_would_not_be_used_is_refused(given, name, message):
    with pytest.raises(ValueError, match=message):
        translate(name, given[name], given)


KEPT = {"vllm_max_model_length": 4096, "vllm_gpu_memory_utilization": 0.5, "vllm_model_impl": "vllm"}  # TRL's default


@pytest.mark.parametrize(
    ("overrides", "vllm"),
    [
        ([], {}),
        (["rollout.engine=hf"], {}),
        (["rollout.engine=vllm"], KEPT),
        (["use_vllm=true"], KEPT),
    ],
)
def test_vllm_turned_off_puts_its_settings_aside(tmp_path, overrides, vllm):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: tiny\nuse_vllm: false\nvllm_mode: colocate\nvllm_server_port: 9000\n"
        "vllm_max_model_length: 4096\nvllm_gpu_memory_utilization: 0.5\n"
    )
    found = changed(load_config(path, overrides))
    assert {name: value for name, value in found.items() if name.startswith("vllm_")} == vllm


def test_vllm_can_be_turned_off_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: tiny\nrollout: {engine: vllm_server}\nvllm: {vllm_num_servers: 2}\n")
    assert changed(load_config(path, ["use_vllm=false"])) == {"model_name_or_path": "tiny"}


@pytest.mark.parametrize("name", ["save_strategy", "eval_strategy"])
def test_epochs_are_refused(name):
    with pytest.raises(ValueError, match="counted in steps"):
        translate(name, "epoch", {})


def test_bf16_beside_float32_is_a_contradiction_outside_of_flat_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {model_name_or_path: tiny}\nbf16: true\ndtype: float32\n")
    with pytest.raises(ConfigError, match=r"`bf16` and `dtype` both set `model\.dtype`"):
        load_config(path)


def test_what_is_said_after_use_vllm_false_is_not_put_aside(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{model_name_or_path: m, use_vllm: false, vllm_max_model_length: 64}")
    assert load_config(path).vllm.vllm_max_model_length is None
    with pytest.raises(ConfigError, match=r"`vllm_max_model_length`.* `engine` hf"):
        load_config(path, ["vllm_max_model_length=128"])
    overrides = ["vllm_max_model_length=128", "rollout.engine=vllm"]
    assert load_config(path, overrides).vllm.vllm_max_model_length == 128
