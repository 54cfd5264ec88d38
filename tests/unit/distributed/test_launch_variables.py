import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml

from rl_vlm.distributed.launch_variables import (
    Launch,
    check_evaluation_launch,
    check_precision,
    read_json,
    take_launch,
)
from rl_vlm.distributed.launcher import check_numbers, check_variables, is_one_of_several, note_short_grace
from rl_vlm.distributed.meeting_point import init_method
from rl_vlm.distributed.ranks import Ranks, check_devices, check_launch
from rl_vlm.errors import LaunchError
from tests.helpers.launching import FILES, environment_of, set_environment

TRL = Path(str(trl.__file__)).parent / "accelerate_configs"


def launch_of(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> Launch:
    set_environment(monkeypatch, environment_of(file, *options))
    return take_launch()


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


def zero_of_options(stage: int, **settings: Any) -> dict[str, Any]:
    """Without a JSON file, sizes follow the width of the model."""
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    return zero(stage, **dict.fromkeys(names, "auto"), **settings)


CPU = {"device": "cpu"}
NONE = {"device": "none"}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cpu", Launch("ddp")),
        ("ddp", Launch("ddp")),
        ("zero2", Launch("deepspeed", deepspeed=zero_of_options(2))),
        ("zero3", Launch("deepspeed", deepspeed=zero_of_options(3))),
        ("zero3_offload", Launch("deepspeed", deepspeed=zero_of_options(3, offload_optimizer=CPU, offload_param=CPU))),
        ("fsdp2", Launch("fsdp2")),
    ],
)
def test_the_files_of_this_project(monkeypatch, name: str, expected: Launch):
    assert launch_of(monkeypatch, FILES / f"{name}.yaml") == expected
    assert not any(os.environ.get(f"ACCELERATE_USE_{engine}") for engine in ("DEEPSPEED", "FSDP"))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("multi_gpu", Launch("ddp", "bf16")),
        ("zero1", Launch("deepspeed", "bf16", zero_of_options(1) | {"gradient_accumulation_steps": 1})),
        ("zero2", Launch("deepspeed", "bf16", zero_of_options(2, offload_optimizer=NONE, offload_param=NONE))),
        (
            "zero3",
            Launch(
                "deepspeed", "bf16",
                zero_of_options(
                    3, offload_optimizer=NONE, offload_param=NONE, stage3_gather_16bit_weights_on_model_save=True
                ),
            ),
        ),
        ("fsdp2", Launch("fsdp2", "bf16")),
    ],
)  # fmt: skip
def test_the_files_of_trl(monkeypatch, name: str, expected: Launch):
    assert launch_of(monkeypatch, TRL / f"{name}.yaml") == expected


def test_without_a_stage_deepspeed_has_stage_2_as_with_accelerate(monkeypatch):
    set_environment(monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true"})
    assert take_launch() == Launch("deepspeed", deepspeed=zero_of_options(2))


def test_trl_s_file_for_fsdp1_is_refused(monkeypatch):
    with pytest.raises(LaunchError, match=r"fsdp_version is 1, .* set fsdp_version to 2, as in .*fsdp2.yaml"):
        launch_of(monkeypatch, TRL / "fsdp1.yaml")


def fsdp_file(folder: Path, **settings: Any) -> Path:
    """fsdp2.yaml with other settings."""
    content = yaml.safe_load((FILES / "fsdp2.yaml").read_text())
    content["fsdp_config"] |= settings
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(content))
    return folder / "fsdp.yaml"


def test_what_fsdp2_reads(monkeypatch, tmp_path):
    wrapped = "Qwen2_5_VLDecoderLayer, Qwen2_5_VLVisionBlock"
    file = fsdp_file(tmp_path, fsdp_reshard_after_forward=False, fsdp_transformer_layer_cls_to_wrap=wrapped)
    layers = ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock")
    assert launch_of(monkeypatch, file) == Launch("fsdp2", reshard_after_forward=False, layers=layers)


def test_values_that_describe_what_happens_anyway_are_accepted(monkeypatch, tmp_path):
    settings = {
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_sharding_strategy": 1,
        "fsdp_min_num_params": 0,
    }
    assert launch_of(monkeypatch, fsdp_file(tmp_path, **settings)) == Launch("fsdp2")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("fsdp_offload_params", True, "only false: remove it"),
        ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "only TRANSFORMER_BASED_WRAP"),
        ("fsdp_auto_wrap_policy", "NO_WRAP", "only TRANSFORMER_BASED_WRAP"),
        ("fsdp_activation_checkpointing", True, "only false"),
        ("fsdp_cpu_ram_efficient_loading", False, "only true"),
        ("fsdp_state_dict_type", "LOCAL_STATE_DICT", "only FULL_STATE_DICT or SHARDED_STATE_DICT"),
        ("fsdp_sharding_strategy", "SHARD_GRAD_OP", "only FULL_SHARD or 1"),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", "only FULL_SHARD"),
        ("fsdp_forward_prefetch", True, "only false"),
        ("fsdp_ignored_modules", "visual", "not supported: remove it"),
        ("fsdp_reshard_after_forward", "FULL_SHARD", "with fsdp2 it is true or false"),
    ],
)
def test_other_settings_of_fsdp_are_refused(monkeypatch, tmp_path, key: str, value: Any, message: str):
    with pytest.raises(LaunchError, match=rf"fsdp_config.{key} .*{message}"):
        launch_of(monkeypatch, fsdp_file(tmp_path, **{key: value}))


def deepspeed_file(folder: Path, config: Any, **options: Any) -> Path:
    """An accelerate file that names a DeepSpeed config."""
    (folder / "ds.json").write_text(config if isinstance(config, str) else json.dumps(config))
    content = yaml.safe_load((FILES / "zero2.yaml").read_text())
    content["deepspeed_config"] = {"deepspeed_config_file": str(folder / "ds.json"), **options}
    (folder / "deepspeed.yaml").write_text(yaml.safe_dump(content))
    return folder / "deepspeed.yaml"


def test_a_deepspeed_config_is_read_as_it_is(monkeypatch, tmp_path):
    config = zero(3, sub_group_size=1e9) | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    assert launch_of(monkeypatch, deepspeed_file(tmp_path, config)).deepspeed == config
    without_accumulation = launch_of(monkeypatch, deepspeed_file(tmp_path, zero(2), zero3_init_flag=False))
    assert without_accumulation.deepspeed == zero(2)


def test_a_key_that_a_deepspeed_config_has_twice_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    with pytest.raises(LaunchError, match=r"ds\.json cannot be read: key `stage` is given twice"):
        read_json(str(tmp_path / "ds.json"))


def test_options_of_the_launcher_fill_a_deepspeed_config(monkeypatch, tmp_path):
    file = deepspeed_file(tmp_path, zero(3, offload_param=None) | {"gradient_clipping": "auto"})
    options = ("--gradient_clipping", "0.5", "--offload_param_device", "cpu", "--zero_stage", "3")
    found = launch_of(monkeypatch, file, *options)
    assert found.deepspeed == zero(3, offload_param=CPU) | {"gradient_clipping": 0.5}
    with pytest.raises(
        LaunchError, match=r"options set zero_optimization.stage to 2, and the .* file to 3: remove one"
    ):
        launch_of(monkeypatch, file, "--zero_stage", "2")


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"zero_optimization": {"stage": 2},}', "cannot be read: .*line 1"),
        ("[]", "has no section zero_optimization with a stage"),
        ('{"bf16": {"enabled": "auto"}}', "has no section zero_optimization with a stage"),
        ('{"zero_optimization": true}', "has no section zero_optimization with a stage"),
    ],
)
def test_a_deepspeed_config_that_cannot_be_read(monkeypatch, tmp_path, content: str, message: str):
    with pytest.raises(LaunchError, match=rf"{re.escape(str(tmp_path / 'ds.json'))} {message}"):
        launch_of(monkeypatch, deepspeed_file(tmp_path, content))


def test_a_deepspeed_config_that_does_not_exist(monkeypatch, tmp_path):
    file = deepspeed_file(tmp_path, {})
    (tmp_path / "ds.json").unlink()
    with pytest.raises(LaunchError, match=r"ds.json cannot be read: .*No such file"):
        launch_of(monkeypatch, file)


@pytest.mark.parametrize(
    "variables, message",
    [
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "parallelism_config .*tensor.*use launch/accelerate/zero3.yaml",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM.*use launch/accelerate/zero3.yaml"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend is inductor.* set it to no"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A"},
            "deepspeed_moe_layer_cls_names is not supported: remove it",
        ),
    ],
)
def test_what_is_not_trained_with_is_refused(monkeypatch, variables: dict[str, str], message: str):
    set_environment(monkeypatch, variables)
    with pytest.raises(LaunchError, match=message):
        take_launch()


@pytest.mark.parametrize("dtype, accepted", [("float32", {"no"}), ("bfloat16", {"no", "bf16"}), (None, {"no", "bf16"})])
def test_the_launcher_s_precision_must_be_that_of_the_run(dtype: str | None, accepted: set[str]):
    for mixed_precision in ("no", "bf16", "fp16", "fp8"):
        if mixed_precision in accepted:
            check_precision(mixed_precision, dtype)
        else:
            with pytest.raises(
                LaunchError, match=f"mixed_precision {mixed_precision}, but model.dtype is {dtype or 'not set'}: set"
            ):
                check_precision(mixed_precision, dtype)


def test_an_evaluation_does_not_shard_and_has_the_run_s_precision():
    check_evaluation_launch(Launch("ddp", "bf16"), "bfloat16")
    for launch, message in (
        (Launch("deepspeed"), "use launch/accelerate/ddp.yaml"),
        (Launch("fsdp2"), "use launch/accelerate/ddp.yaml"),
        (Launch("ddp", "bf16"), "mixed_precision bf16, but model.dtype is float32"),
    ):
        with pytest.raises(LaunchError, match=message):
            check_evaluation_launch(launch, "float32")


@pytest.mark.parametrize(
    "variables, seen, launched",
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, 1, "2"),
        ({"WORLD_SIZE": "8"}, 4, "8"),
        ({"MASTER_ADDR": "127.0.0.1"}, 1, "several"),  # what --cpu --num_processes 2 sets
    ],
)
def test_processes_that_do_not_see_each_other_are_refused(monkeypatch, variables, seen: int, launched: str):
    for name in ("WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    check_launch(1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        LaunchError, match=rf"asked for {launched} processes, but this one sees {seen} .*ACCELERATE_USE_CPU"
    ):
        check_launch(seen)


ALL = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def without(*names: str, **others: str) -> dict[str, str]:
    return {name: value for name, value in (ALL | others).items() if name not in names}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        ALL,
        without("LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # a script for several machines with a process on each
        {"WORLD_SIZE": "1"},
        without(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_PORT="0"),
        {"MASTER_ADDR": "127.0.0.1"},  # of `accelerate launch --cpu`, for which `check_launch` has a message of its own
    ],
)
def test_launch_variables_that_fit_together(variables: dict[str, str]):
    check_variables(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT. Start the processes with `accelerate",
        ),
        ({"RANK": "0"}, "RANK=0 without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (without("MASTER_ADDR"), "WORLD_SIZE=2, MASTER_PORT=1, LOCAL_RANK=1 without MASTER_ADDR"),
        (without("MASTER_ADDR", MASTER_ADDR=""), "without MASTER_ADDR"),
        (without(MASTER_ADDR=""), "without MASTER_ADDR"),
        (without("MASTER_PORT"), "without MASTER_PORT"),
        (without("WORLD_SIZE"), "without WORLD_SIZE"),
        (without("RANK"), "without RANK"),
    ],
)
def test_launch_variables_that_are_incomplete(variables: dict[str, str], message: str):
    check_numbers(variables)
    with pytest.raises(LaunchError, match=rf"the launch variables are incomplete: .*{re.escape(message)}"):
        check_variables(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        *(({name: text}, f"{name} is {text!r}: it must be a whole number") for name in ("RANK", "WORLD_SIZE")
          for text in ("", "x", "-1", "1.0", "²", "9" * 5000)),
        *((without(MASTER_PORT=text), f"MASTER_PORT is {text!r}: it must be a whole number from 0 to 65535")
          for text in ("x", "-1", "99999")),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0': it must be a whole number from 1"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        (without(RANK="2"), "RANK is 2, but must be below WORLD_SIZE, which is 2"),
        (without(LOCAL_RANK="5"), "LOCAL_RANK is 5, but must be below LOCAL_WORLD_SIZE, which is 2"),
    ],
)  # fmt: skip
def test_launch_variables_that_are_no_numbers(variables: dict[str, str], message: str):
    with pytest.raises(LaunchError, match=re.escape(message)):
        check_numbers(variables)


def test_one_process_does_not_mind_a_port_of_another_service():
    check_variables({"MASTER_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "2"}, False),
        (without(), True),
        (without(RANK="x"), False),
        (without(RANK="5"), False),
        (without(MASTER_PORT="x"), False),
        (without(WORLD_SIZE="9" * 5000), False),
    ],
)
def test_one_of_several(variables: dict[str, str], expected: bool):
    assert is_one_of_several(variables) is expected


@pytest.mark.parametrize("value", ["2", "x"])
def test_a_world_size_set_by_hand_ends_a_run_with_a_message(monkeypatch, value: str):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(LaunchError, match="launch variable"):
        Ranks()


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    check_devices(8)
    check_devices(0)  # processes on CPUs
    with pytest.raises(
        LaunchError, match=r"started 8 processes on this machine, which has 2 devices: .*--num_processes to 2"
    ):
        check_devices(2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    check_devices(1)


def test_processes_that_were_restarted_do_not_meet_where_the_ended_ones_did(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = []
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        found.append(init_method())
    assert found == [None, "rl-vlm-restarted://"]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, []),
        ({"TORCHELASTIC_RUN_ID": "none"}, ["within 30 s: for more, start it with TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600"]),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, []),
    ],
)
def test_a_launcher_that_leaves_less_than_the_grace_period_is_named(variables, found, monkeypatch, caplog):
    for name in ("TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        note_short_grace(600.0)
    assert [text.partition("saved ")[2] for text in caplog.messages] == found
