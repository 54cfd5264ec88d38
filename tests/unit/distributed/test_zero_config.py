"""DeepSpeed configs as other projects ship them, and what is changed in them here."""

import re
import sys
from typing import Any

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.zero import import_deepspeed
from rl_vlm.distributed.zero_config import asks_for_nothing, check_zero_config, zero_config
from rl_vlm.errors import ConfigError, LaunchError

deepspeed = pytest.importorskip("deepspeed")

# On two processes: 4 prompts x 8 completions = 32 completions per step, 16 per process.
RUN = {"model.model_name_or_path": "m", "data.dataset_name": "d", "rewards.reward_funcs": ["exact_match"]}
BATCH = {"train.prompts_per_step": 4, "rollout.num_generations": 8, "train.max_grad_norm": 0.5}
HALVES = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
}
AUTO = HALVES | {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
NONE = {"device": "none", "pin_memory": True}
CPU = {"device": "cpu", "pin_memory": True}
ZERO1 = {
    "stage": 1,
    "offload_optimizer": NONE,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "offload_optimizer": NONE,
    "offload_param": NONE,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}}


def run_config(**changed: Any) -> RunConfig:
    """Settings by dotted names, on top of `RUN` and `BATCH`."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in (RUN | BATCH | changed).items():
        section, _, leaf = name.partition(".")
        sections.setdefault(section, {})[leaf] = value
    return RunConfig(**sections)  # type: ignore[arg-type]


def check(asked: dict[str, Any], **changed: Any) -> None:
    check_zero_config(asked, run_config(**changed), world_size=2)


@pytest.mark.parametrize(
    "asked",
    [
        AUTO | {"zero_optimization": ZERO1},
        AUTO | {"zero_optimization": ZERO1 | {"stage": 2}},
        AUTO | {"zero_optimization": ZERO1 | {"stage": 2, "offload_optimizer": CPU}},
        AUTO | {"zero_optimization": ZERO1 | {"stage": 2}, "tensor_parallel": {"autotp_size": 1}},
        AUTO | {"zero_optimization": ZERO3},
        AUTO | {"zero_optimization": ZERO3 | {"offload_optimizer": CPU, "offload_param": CPU}},
        AUTO | {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5e7, "sub_group_size": 1e14}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "nvme_path": None}}},
        {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 1, "torch_autocast": {"enabled": False}},
    ],
    ids=[
        "ms-swift zero1", "ms-swift zero2", "zero2 with offload", "ms-swift zero2_autotp", "ms-swift zero3",
        "zero3 with offload", "VLM-R1 zero3", "accelerate", "older names", "disabled sections",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_configs_that_leave_values_to_the_run_are_accepted(asked: dict[str, Any], dtype: str):
    check(asked, **{"model.dtype": dtype})
    config = zero_config(asked, run_config(), hidden_size=8, has_gpu=True)
    assert config["gradient_clipping"] == 0.5
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_accumulation_steps"] == 1
    assert config.keys().isdisjoint({"train_batch_size", "bf16", "fp16", "tensor_parallel"})
    deepspeed.runtime.config.DeepSpeedConfig(config)


def test_sizes_that_are_auto_follow_the_width_of_the_model():
    asked = {"zero_optimization": ZERO3 | {"overlap_comm": "auto"}}
    zero = zero_config(asked, run_config(), hidden_size=100, has_gpu=True)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 10_000
    assert zero["stage3_prefetch_bucket_size"] == 9_000
    assert zero["stage3_param_persistence_threshold"] == 1_000
    assert "overlap_comm" not in zero and asked["zero_optimization"]["overlap_comm"] == "auto"


def test_what_is_passed_on():
    asked = {"zero_optimization": {"stage": 2}, "steps_per_print": 7, "wall_clock_breakdown": True}
    config = zero_config(asked, run_config(), hidden_size=8, has_gpu=True)
    assert (config["steps_per_print"], config["wall_clock_breakdown"]) == (7, True)
    assert "zero_force_ds_cpu_optimizer" not in config
    assert zero_config(asked, run_config(), hidden_size=8, has_gpu=False)["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bf16": True}, 'write a section, {"bf16": {…}}'),
        ({"flops_profiler": True}, 'write a section, {"flops_profiler": {…}}'),
        ({"fp16": {"enable": True}}, "fp16 to {'enable': True}, which DeepSpeed cannot read"),
        ({"bf16": {"enabld": False}}, "bf16 to {'enabld': False}, which DeepSpeed cannot read"),
        ({"bf16": {"immediate_grad_update": True}}, "bf16.immediate_grad_update: remove it"),
        ({"communication_data_type": "float16"}, "communication_data_type to 'float16', which DeepSpeed cannot read"),
        ({"comms_logger": {"enabld": True}}, "comms_logger to {'enabld': True}, which DeepSpeed cannot read"),
        ({"wall_clock_breakdown": "auto"}, "wall_clock_breakdown to 'auto', which DeepSpeed cannot read"),
    ],
)
def test_values_that_deepspeed_cannot_read_are_refused(section: dict[str, Any], message: str):
    with pytest.raises(LaunchError, match=re.escape(message)):
        check({"zero_optimization": {"stage": 3}, **section})


@pytest.mark.parametrize(
    "section",
    [
        {"sparse_gradients": False},
        {"curriculum_learning": {"enabled": False}},
        {"zero_allow_untested_optimizer": True},
        {"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}},
    ],
)
def test_what_asks_for_nothing_is_accepted(section: dict[str, Any]):
    check({"zero_optimization": {"stage": 3}, **section})


@pytest.mark.parametrize(
    "changed, equal, other",
    [
        ({}, {"train_batch_size": 32}, {"train_batch_size": 16}),
        ({}, {"train_micro_batch_size_per_gpu": 16}, {"train_micro_batch_size_per_gpu": 1}),
        ({}, {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 8}),
        ({}, {"gradient_clipping": 0.5}, {"gradient_clipping": 1.0}),
        ({"train.max_grad_norm": 1.0}, {"gradient_clipping": 1}, {"gradient_clipping": 0.0}),
        (
            {"train.gradient_accumulation_steps": 4},
            {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 4, "train_batch_size": 32},
            {"gradient_accumulation_steps": 1},
        ),
        (
            {"train.prompts_per_step": None, "train.per_device_train_batch_size": 8},
            {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 8, "train_batch_size": 16},
            {"train_micro_batch_size_per_gpu": 16},
        ),
        ({"model.dtype": "bfloat16"}, {"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}),
        ({"model.dtype": "float32"}, {"bf16": {"enabled": False}}, {"bf16": {"enabled": True}}),
        ({"model.dtype": "bfloat16"}, {"fp16": {"enabled": False}}, {"fp16": {"enabled": True}}),
    ],
)
def test_explicit_values_must_be_those_of_the_run(
    changed: dict[str, Any], equal: dict[str, Any], other: dict[str, Any]
):
    zero = {"zero_optimization": {"stage": 2}}
    check(zero | equal, **changed)
    ((name, value),) = other.items()
    shown = value["enabled"] if isinstance(value, dict) else value
    with pytest.raises(LaunchError, match=rf"sets {name}(\.enabled)? to {shown}, but .*: set\s+{name}.* to auto"):
        check(zero | other, **changed)


def test_batches_that_cannot_be_shared_are_a_fault_of_the_settings():
    with pytest.raises(ConfigError, match="`prompts_per_step` 3 "):
        check({"zero_optimization": {"stage": 2}}, **{"train.prompts_per_step": 3})


@pytest.mark.parametrize(
    "section, message",
    [
        ({"optimizer": OPTIMIZER}, "has optimizer, which a run does not read: remove it"),
        ({"scheduler": SCHEDULER}, "has scheduler, which"),
        ({"tensor_parallel": {"autotp_size": 2}}, "has tensor_parallel, which"),
        ({"sequence_parallel_size": 2}, "has sequence_parallel_size, which"),
        ({"activation_checkpointing": {"partition_activations": True}}, "has activation_checkpointing, which"),
        ({"managed_gradient_accumulation": True}, "has managed_gradient_accumulation"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "has torch_autocast, which"),
        (
            {"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}},
            "sets bf16.bf16_master_weights_and_grads",
        ),
        ({"tensorboard": {"enabled": True}}, "has tensorboard, which"),
        ({"monitor_config": {"enabled": True}}, "has monitor_config, which"),
        ({"gradient_clippping": 1.0}, r"gradient_clippping \(did you mean 'gradient_clipping'\?\)"),
        ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
    ],
)
def test_sections_that_are_not_used_are_refused_by_name(section: dict[str, Any], message: str):
    with pytest.raises(LaunchError, match=message):
        check(AUTO | {"zero_optimization": ZERO3} | section, **{"model.dtype": "bfloat16"})


@pytest.mark.parametrize(
    "zero, message",
    [
        ({"stage": 0}, "ZeRO stage 0 is not supported: .* use launch/accelerate/ddp.yaml"),
        ({}, "ZeRO stage None is not supported"),
        (
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk"}},
            "offload_param.device nvme is not supported",
        ),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, "offload_optimizer.device nvme is not supported"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3, but the stage is 2"),
        ({"stage": 2, "cpu_offload": True}, "cpu_offload is not supported"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "remove ratio"),
        ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights is not supported: remove it"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size is not supported"),
        ({"stage": 2, "ignore_unused_parameters": False}, "ignore_unused_parameters false is not supported"),
        ({"stage": 2, "compute_grad_norm": False}, "compute_grad_norm false is not supported"),
        (
            {"stage": 3, "stage3_max_live_paramters": 1e9},
            r"stage3_max_live_paramters .*: not known \(did you mean 'stage3_max_live_parameters'\?\)",
        ),
        ({"stage": 3, "offload_param": {"devise": "cpu"}}, r"offload_param.devise 'cpu': not known"),
        ({"stage": 3, "reduce_bucket_size": "large"}, "reduce_bucket_size 'large': Input should be a valid integer"),
        ({"stage": 3, "mics_shard_size": 8}, "mics_shard_size 8: not known"),
    ],
)
def test_what_zero_does_not_do_here_is_refused(zero: dict[str, Any], message: str):
    with pytest.raises(LaunchError, match=message):
        check({"zero_optimization": zero})


@pytest.mark.parametrize("value", [None, False, 0, 1, {}, {"enabled": False, "size": 8}, {"autotp_size": 1}, "auto"])
def test_values_that_ask_for_nothing(value: Any):
    assert asks_for_nothing(value)


@pytest.mark.parametrize("value", [True, 2, "AdamW", {"enabled": True}, {"enabled": "auto", "dtype": "fp16"}])
def test_values_that_ask_for_something(value: Any):
    assert not asks_for_nothing(value)


def test_a_deepspeed_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(LaunchError, match=r"cannot be imported .*: pip install -e '\.\[deepspeed\]'"):
        import_deepspeed()


def test_a_deepspeed_that_is_too_old(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", "0.18.9")
    with pytest.raises(LaunchError, match=r"DeepSpeed 0.18.9 is too old, rl-vlm needs 0.19.8 or newer: pip install"):
        import_deepspeed()
