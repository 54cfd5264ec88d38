"""Phases, limits and largest sizes of a plan, by hand arithmetic on a model of 1,000 weights."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.errors import ConfigError
from rl_vlm.model.group_cache import ROOM
from rl_vlm.plan.build import (
    PLANNED_STAGES,
    Model,
    completions_together,
    plan_memory,
    planned_stages,
    single_completion,
)
from rl_vlm.plan.hardware import Card, Hardware
from rl_vlm.plan.host import host_phases
from rl_vlm.plan.memory import Load, MemoryPlan, Rollouts
from rl_vlm.plan.observed import observed_images
from rl_vlm.plan.packaged import packaged_config
from rl_vlm.plan.tracing.activations import Activations
from rl_vlm.plan.weights import Weights, count_weights

GIB = 2**30
CARD = Card("test", 20_000 + 2**30)
WEIGHTS = Weights(
    num=1000, num_active=1000, num_trained=1000, trained_bytes=4000, frozen_bytes=0, reference_bytes=0, layer_bytes=320,
    layer_cast=160, layers_cast=1600,
    rest_bytes=800, layer_trained=80, largest_trained=50, matrix_rows_and_columns=120, trains_vision=False,
    num_vision=100, is_adapter=False, dequantized_bytes=0,
)  # fmt: skip
ACTIVATIONS = Activations(
    per_token=4.0, fixed=100.0, per_patch=3.0, vision_per_patch=5.0, logprobs_per_token=1.0, logprobs_fixed=50.0
)


def a_plan(sharding: str = "ddp", num_ranks: int = 1, **changes: Any) -> MemoryPlan:
    plan = MemoryPlan(
        card=Card("test", 100 * GIB), num_ranks=num_ranks, sharding=SHARDINGS[sharding], optim="adamw_torch",
        weights=WEIGHTS, activations=ACTIVATIONS, rollouts=Rollouts({"vLLM": 700, "KV cache": 900}, 40),
        micro_batch_tokens=200, load=Load(200, 20), patches_per_token=0.1, buffers=64, largest_block=800,
        stages=PLANNED_STAGES,
    )  # fmt: skip
    return replace(plan, **changes)


def parts_of(plan: MemoryPlan, phase: str) -> dict[str, int]:
    return next({name: size for name, size in each.parts.items() if size} for each in plan.phases if each.name == phase)


def a_config(**rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "any", "dtype": "bfloat16"},
            "data": {"dataset_name": "any"},
            "rewards": {"reward_funcs": ["exact_match"]},
            "rollout": {"num_generations": 4, "max_completion_length": 100, **rollout},
            "train": {"prompts_per_step": 8},
        }
    )


def a_model(**weights: Any) -> Model:
    text = SimpleNamespace(
        hidden_size=8, num_hidden_layers=2, num_key_value_heads=1, head_dim=4, num_attention_heads=2, vocab_size=10,
        intermediate_size=16,
    )  # fmt: skip
    config = SimpleNamespace(get_text_config=lambda: text, vision_config=SimpleNamespace(num_heads=1))
    return Model(config, replace(WEIGHTS, **weights), ACTIVATIONS, prompt_tokens=49, patches=40)


def planned(config: RunConfig, sharding: str = "ddp", gpus: int = 1, **weights: Any) -> MemoryPlan:
    return plan_memory(config, Hardware(CARD, gpus, 1, SHARDINGS[sharding]), a_model(**weights))


def test_what_is_held_in_training():
    held = {"weights": 4000, "optimizer state": 8000, "communication buffers": 64}
    passes = {"language activations": 800, "LM head and copies": 100, "vision activations": 60}
    assert parts_of(a_plan(), "training") == held | passes | {"gradients": 4000, "vLLM": 40}
    assert parts_of(a_plan(), "generation") == held | {"vLLM": 700, "KV cache": 900}


def test_the_cache_of_a_sleeping_vllm_is_not_allocated_while_weights_are_sent():
    plan = a_plan()
    parts = parts_of(plan, "weight_sync")
    assert (parts["vLLM"], parts.get("KV cache"), parts["gathered weights"]) == (700, None, 800)
    # 5% and 0.6 GiB of the card are not available; beside vLLM are weights, moments and buffers.
    assert plan.free_for_vllm == plan.available - (4000 + 8000 + 64)
    awake = parts_of(a_plan(rollouts=Rollouts({"vLLM": 700, "KV cache": 900}, 1600)), "weight_sync")
    assert (awake["vLLM"], awake["KV cache"], awake["gathered weights"]) == (700, 900, 800)


def test_gradients_of_zero3_stay_between_steps():
    plan = a_plan("zero3", num_ranks=2)
    assert {parts_of(plan, name).get("gradients") for name in ("generation", "weight_sync", "save", "update")} == {2000}
    assert "gradients" not in parts_of(a_plan("zero2", num_ranks=2), "generation")
    assert "gradients" not in parts_of(a_plan("zero3_offload", num_ranks=2), "update")


def test_a_plan_does_not_fit_if_vllm_cannot_start():
    assert a_plan().fits
    assert not a_plan(rollouts=Rollouts({"vLLM": 700}, 40, can_start=False)).fits


def test_vllm_needs_one_sequence():
    # Its weights take 2,000 bytes, its profiling pass 2 x 8,192 x (3 x 16 + 2 x 8), its graphs 2^29.
    needs = 2000 + 1_048_576 + 2**29
    sequence = 160 * 2 * 2 * 4 * 2  # 149 tokens in blocks of 16; keys and values of 2 layers with 4 numbers of 2 bytes
    card = Card("test", 4 * GIB)
    for memory, starts in ((needs + sequence, True), (needs + sequence - 5, False)):
        config = a_config(engine="vllm")
        config.vllm.vllm_gpu_memory_utilization = (memory + 1) / card.memory
        plan = plan_memory(config, Hardware(card, 1, 1, SHARDINGS["ddp"]), a_model())
        assert plan.rollouts.can_start == starts


def test_the_largest_micro_batch_has_its_images():
    # 4 bytes per token and 0.1 patches of 3 bytes beside each
    free = 4300 + 100
    card = Card("test", round((a_plan().beside_micro_batch + free + round(0.6 * GIB)) / 0.95) + 1)
    plan = a_plan(card=card)
    assert plan.largest_tokens in (998, 999)
    at_most = replace(plan, load=Load(999, 99), micro_batch_tokens=999)
    assert at_most.fits
    assert not replace(plan, load=Load(1010, 101), micro_batch_tokens=1010).fits


def test_a_frozen_tower_that_runs_limits_the_micro_batch():
    card = Card("test", round((a_plan().beside_micro_batch + 4400 + round(0.6 * GIB)) / 0.95) + 1)
    running = replace(ACTIVATIONS, vision_per_patch=100.0)  # 10 bytes per token of the budget
    assert a_plan(card=card, activations=running).largest_tokens in (438, 439)
    with_copies = replace(running, vision_fixed=400.0)  # (4400 - 400) / 10
    assert a_plan(card=card, activations=with_copies).largest_tokens in (398, 399)


def test_patches_of_a_frozen_tower_are_those_of_short_completions():
    config = a_config(engine="hf")
    config.memory.micro_batch_tokens = 500
    plan = planned(config)
    assert (plan.load, plan.patches_per_token) == (Load(500, 400), 0.8)  # 10 prompts of 49 tokens and one
    assert planned(config, trains_vision=True).patches_per_token == 0


def test_images_of_observations_are_planned():
    """Images of 30 tokens and 40 patches: 100 tokens of a trajectory hold 3, one after each of 3 turns of 4."""
    tools: dict[str, Any] = {"engine": "hf", "tools": ["tools.py:crop"]}
    trained = replace(a_model(trains_vision=True), image_tokens=30)  # a patch costs 3 / 4 of a token
    for turns, images in ((4, 3), (3, 2), (10, 3), (1, 0)):
        config = a_config(max_turns=turns, **tools)
        assert observed_images(config.rollout, 30) == images
        assert single_completion(config, trained) == 49 + 100 + (1 + images) * 30
    edits = a_config(max_turns=10, keep_images=1, edit_every=2, **tools)  # contexts are trained apart, with 2 images
    assert single_completion(edits, trained) == 49 + 100 + (1 + 2) * 30
    assert observed_images(a_config().rollout, 30) == 0  # without tools
    assert observed_images(a_config(max_turns=4, **tools).rollout, 0) == 0  # without an image in the prompt

    config = a_config(max_turns=4, **tools)
    config.memory.micro_batch_tokens = 500
    frozen = plan_memory(config, Hardware(CARD, 1, 1, SHARDINGS["ddp"]), replace(a_model(), image_tokens=30))
    # An image for every 33 tokens of trajectories, where prompts alone have one for every 50.
    assert (frozen.load, frozen.patches_per_token) == (Load(500, 40 * 15), 40 / 33)
    trained = replace(a_model(trains_vision=True), image_tokens=30)
    plan = plan_memory(config, Hardware(CARD, 1, 1, SHARDINGS["ddp"]), trained)
    assert plan.load == Load(500 - 4 * 30, 4 * 40)
    # 421 tokens beside the prompt and its image hold 2 completions of 100 tokens and 3 images.
    assert completions_together(config, trained, replace(plan, card=Card("test", 100 * GIB))) == 2


def test_later_turns_hold_a_copy_of_the_prompt_for_each_completion():
    """148 tokens are computed again for each of 6 completions, and kept in float32 and in bfloat16."""
    per_token, copied = 2 * 2 * 4 * 2, 6 * (1 + ROOM)
    expected = (3 * 6 * 148 + copied) * per_token + copied * per_token // 2
    config = a_config(engine="hf", max_num_seqs=6, tools=["tools.py:crop"])
    assert planned(config).rollouts.while_sampling["KV cache"] == expected
    assert planned(a_config(engine="hf", max_num_seqs=6)).rollouts.while_sampling["KV cache"] < expected


@pytest.mark.parametrize(
    ("train", "algorithm", "expected"),
    [
        ({"prompts_per_step": 8}, {}, []),
        ({"prompts_per_step": 8}, {"beta": 0.1}, ["ref_logprobs"]),
        # later iterations have the log-probs of the first one's forward
        ({"prompts_per_step": 8}, {"num_iterations": 2}, []),
        ({"prompts_per_step": 8, "steps_per_generation": 2}, {}, ["old_logprobs"]),
        # 32 completions a step in 8 micro-steps of 4: one step per window
        ({"prompts_per_step": 8, "per_device_train_batch_size": 4, "steps_per_generation": 8}, {}, []),
        ({"prompts_per_step": 8, "per_device_train_batch_size": 4, "steps_per_generation": 16}, {}, ["old_logprobs"]),
        ({"prompts_per_step": 8}, {"top_entropy_quantile": 0.2}, ["entropy"]),
    ],
)
def test_log_probs_that_are_computed_apart_are_planned(train, algorithm, expected):
    data = a_config().model_dump(exclude_unset=True) | {"train": train, "algorithm": algorithm}
    found = planned_stages(RunConfig.model_validate(data), num_ranks=1)
    assert found == ("load", "generation", *expected, "training", "update", "save")


def test_an_engine_with_weights_of_its_own_is_sent_weights():
    assert "weight_sync" in planned_stages(a_config(engine="vllm_server"), num_ranks=1)


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="prompts_per_step"):
        planned_stages(a_config(), num_ranks=7)


def test_rollouts_with_offloaded_weights_on_one_rank():
    config = a_config(engine="hf")
    whole = parts_of(planned(config, "zero3_offload"), "generation")
    assert (whole["gathered weights"], whole["LM head and copies"]) == (4000, 2000)
    by_layer = parts_of(planned(a_config(engine="hf", ds3_gather_for_generation=False), "zero3_offload"), "generation")
    # In lockstep nothing stays gathered or cast: all outside of layers, a layer, and one tensor in bfloat16.
    assert (by_layer["gathered weights"], by_layer["LM head and copies"]) == (800 + 320, 100)
    assert "gathered weights" not in parts_of(planned(config, "zero3"), "generation")
    of_fsdp2 = parts_of(planned(config, "fsdp2", gpus=2), "generation")  # its layers are gathered in bfloat16
    assert (of_fsdp2["gathered weights"], of_fsdp2["LM head and copies"]) == (800 + 1600, 100)
    assert parts_of(planned(config, "zero3_offload"), "save")["gathered weights"] == 800


@pytest.mark.ci
def test_experts_that_a_token_uses():
    folder = packaged_config("Qwen/Qwen3-VL-30B-A3B-Instruct")
    weights = count_weights(a_config(), str(folder))
    experts = 48 * 128 * 3 * 2048 * 768  # in 48 layers, of which 8 of 128 are chosen
    assert weights.num - weights.num_active == experts - experts // 16
    assert 3.0e9 < weights.num_active < 4.0e9  # "A3B", and a vision tower


def test_host_memory():
    config = a_config()
    config.data.dataloader_num_workers = 0
    plans = {"full": WEIGHTS, "lora": replace(WEIGHTS, trained_bytes=40, frozen_bytes=520, is_adapter=True)}
    found = {
        name: host_phases(config, a_plan(weights=weights), gpus=1)[0].parts["checkpoint"]
        for name, weights in plans.items()
    }
    assert found == {"full": 4 * 1000, "lora": 560}  # in float32, or as it is held
    offloaded = {name: host_phases(config, a_plan(name, 2), gpus=2)[1].parts["offloaded"] for name in SHARDINGS}
    weights, state = 4000, 4000 + 4000 + 8000  # a copy of the weights, gradients and moments
    assert offloaded == dict.fromkeys(SHARDINGS, 0) | {
        "zero1_offload": state, "zero2_offload": state, "zero3_offload_optimizer": state,
        "zero3_offload_param": weights, "zero3_offload": weights + state,
    }  # fmt: skip
