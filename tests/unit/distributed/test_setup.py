"""Settings that a sharding or a number of ranks refuses."""

import pytest

from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.errors import ConfigError, LaunchError, RLVLMError
from tests.helpers.planned_model import run_config

QLORA = {"model": {"use_peft": True, "load_in_4bit": True}, "rollout": {"engine": "hf"}}


def messages(sections: dict, sharding: str = "ddp", num_ranks: int = 2) -> list[str]:
    return [str(error) for error in setup_problems(run_config(**sections), SHARDINGS[sharding], num_ranks).errors]


@pytest.mark.parametrize(
    ("sections", "sharding", "num_ranks", "message"),
    [
        ({}, "ddp", 7, "`prompts_per_step` 8 cannot be shared equally among 7 processes"),
        (
            {"rollout": {"engine": "vllm"}, "vllm": {"vllm_tensor_parallel_size": 4}}, "ddp", 2,
            "vllm.vllm_tensor_parallel_size 4 does not divide the run's 2 processes",
        ),
        (
            {"train": {"optim": "adamw_8bit"}}, "zero2", 2,
            "train.optim: adamw_8bit cannot be used with zero2: its moments are quantized in blocks of 256 values",
        ),
        (
            {"train": {"optim": "adafactor"}}, "fsdp2", 2,
            "train.optim: adafactor cannot be used with fsdp2: its moments are those of the rows and columns",
        ),
        (QLORA, "fsdp2", 2, "model.load_in_4bit cannot be used with fsdp2: the scales of 4-bit weights"),
        (
            {"model": {"use_peft": True, "init_lora_weights": "pissa"}}, "zero3", 2,
            "model.init_lora_weights: pissa is computed from the base weights, but with zero3 only one process",
        ),
        (
            {"model": {"use_peft": True, "init_lora_weights": "olora"}}, "zero3_offload", 2,
            "model.init_lora_weights: olora is computed from the base weights, but with zero3_offload only one",
        ),
    ],
)  # fmt: skip
def test_settings_that_a_sharding_refuses(sections: dict, sharding: str, num_ranks: int, message: str) -> None:
    (found,) = messages(sections, sharding, num_ranks)
    assert found.startswith(message)
    assert messages(sections, "ddp", num_ranks=8) == []


@pytest.mark.parametrize("initialisation", [True, False, "gaussian", "orthogonal"])
def test_other_initialisations_are_used(initialisation: bool | str) -> None:
    assert messages({"model": {"use_peft": True, "init_lora_weights": initialisation}}, "fsdp2") == []


def test_weights_that_stay_whole_may_be_quantized() -> None:
    assert messages(QLORA, "zero2_offload") == messages({"train": {"optim": "adamw_torch"}}, "fsdp2") == []


def test_all_problems_are_found_at_once() -> None:
    run = run_config(**QLORA, train={"optim": "adafactor", "prompts_per_step": 8})
    problems = setup_problems(run, SHARDINGS["zero3"], 3)
    assert [type(error) for error in problems.errors] == [LaunchError, ConfigError, ConfigError]
    with pytest.raises(RLVLMError, match=r"(?s)adafactor cannot .*load_in_4bit cannot .*`prompts_per_step` 8 "):
        problems.refuse()
