"""A model to plan for, of round numbers: 4 GiB with gradients and AdamW's moments, and 1 MiB for each token."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.plan.build import Model
from rl_vlm.plan.hardware import CUDA_CONTEXT, FRAGMENTATION_RESERVE, GIB, Card, Hardware
from rl_vlm.plan.tracing.activations import Activations
from rl_vlm.plan.weights import Weights

MIB = 2**20
NUM = GIB // 4
TEXT = SimpleNamespace(
    num_attention_heads=8, num_key_value_heads=8, head_dim=64, num_hidden_layers=16, hidden_size=512,
    intermediate_size=2048, vocab_size=1000,
)  # fmt: skip
CONFIG = SimpleNamespace(get_text_config=lambda: TEXT, vision_config=SimpleNamespace(num_heads=8))
ACTIVATIONS = Activations(
    per_token=float(MIB), fixed=0.0, per_patch=MIB / 2, vision_per_patch=MIB / 2, logprobs_per_token=0.0,
    logprobs_fixed=0.0, layers_per_token=0.75 * MIB, layers_per_patch=MIB / 4,
)  # fmt: skip
FULL = Weights(
    num=NUM, num_active=NUM, num_vision=NUM // 4, trains_vision=True, is_adapter=False, num_trained=NUM,
    trained_bytes=GIB, frozen_bytes=0, reference_bytes=0, layer_bytes=GIB // 16, layer_cast=GIB // 32,
    layers_cast=GIB * 15 // 32, rest_bytes=GIB // 16, layer_trained=NUM // 16, largest_trained=NUM // 16,
    dequantized_bytes=0, matrix_rows_and_columns=2**20,
)  # fmt: skip


def planned_model(config: RunConfig) -> Model:
    """Make the model as `config` loads it. Gradient checkpointing keeps half of the activations."""
    frozen, weights = config.model.freeze_vision_tower, FULL
    if frozen:
        weights = replace(weights, trains_vision=False, num_trained=NUM * 3 // 4, trained_bytes=GIB * 3 // 4)
        weights = replace(weights, frozen_bytes=GIB // 8)  # in bfloat16
    if config.model.use_peft:
        size = GIB // 8 if config.model.load_in_4bit else GIB // 2
        weights = replace(weights, is_adapter=True, num_trained=NUM // 64, trained_bytes=GIB // 64, frozen_bytes=size)
    found = ACTIVATIONS
    if config.memory.gradient_checkpointing:
        found = replace(found, per_token=MIB / 2, layers_per_token=MIB / 4)
    return Model(CONFIG, weights, found, prompt_tokens=100, patches=64)


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """Return the settings of a run with 8 prompts per step, 4 completions of 380 tokens for each."""
    given: dict[str, dict[str, Any]] = {
        "model": {"model_name_or_path": "any"},
        "rollout": {"num_generations": 4, "max_completion_length": 380, "engine": "vllm_server"},
        "train": {"prompts_per_step": 8},
        "memory": {"micro_batch_tokens": 512},
    }
    return RunConfig.model_validate(given | {name: given.get(name, {}) | more for name, more in sections.items()})


def hardware(gib: float, gpus: int = 1, nodes: int = 1, sharding: str = "ddp") -> Hardware:
    """Return GPUs that each offer `gib` to the run if they are alone."""
    memory = int((gib * GIB + CUDA_CONTEXT) / (1 - FRAGMENTATION_RESERVE)) + 1
    return Hardware(Card("a card", memory), gpus, nodes, SHARDINGS[sharding])
