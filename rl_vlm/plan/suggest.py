"""`rl-vlm plan --suggest`: set-ups, the ones that fit best first, and the smallest ones if none fits.

shardings × one saving each ─ those that a run refuses are left out ─► Setup with its plan and time
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from rl_vlm.config import yaml_text
from rl_vlm.config.engines import engines_where
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.unread import by_section, unread_settings
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.errors import RLVLMError
from rl_vlm.plan.build import (
    Model,
    completions_together,
    inspect_model,
    plan_memory,
    single_completion,
    vllm_fractions,
    with_weights,
)
from rl_vlm.plan.hardware import Hardware
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.speed import step_seconds

MAX_NODES = 64
"""The largest number of machines that is tried."""
GPUS_OF_NODE = 8

Changes = dict[str, Any]
"""New values of settings by their full names."""

METHODS = {"model.load_in_4bit": "QLoRA", "model.use_peft": "LoRA"}
"""Names of the ways to train that a setting turns on, the strongest saving first."""


@dataclass(frozen=True)
class Setup:
    """One way to run the training, with its plan."""

    changes: Changes
    """Settings that differ from the run's."""
    hardware: Hardware
    plan: MemoryPlan
    together: int
    """Completions of a group in one micro-batch. A group that is cut computes its prompt several times."""
    seconds: float
    """Estimated time of an optimizer step without sampling, by vLLM or by the model."""

    @property
    def name(self) -> str:
        settings = [f"{key}={yaml_text.one_line(value)}" for key, value in self.changes.items()]
        method = next((f"{name}:" for key, name in METHODS.items() if self.changes.get(key)), "")
        return " ".join(filter(None, [method, ", ".join([self.hardware.sharding.name, *settings])]))

    @property
    def order(self) -> tuple[int, int, float]:
        """Return the key by which set-ups are sorted: memory first, estimated time last.

        Set-ups that fit come first, with the most completions of a group together. The others follow by their peak.
        """
        return (0, -self.together, self.seconds) if self.plan.fits else (1, self.plan.peak.total, self.seconds)


class Models:
    """The models of changed settings. Settings with the same activations share one trace."""

    def __init__(self, config: RunConfig, model: Model) -> None:
        """Start with `model`, which was traced for `config`."""
        self.offloads = config.memory.activation_offloading
        self.traced = {traced_settings(config): model}
        self.counted = {config.model.model_dump_json() + traced_settings(config): model}

    def of(self, config: RunConfig) -> Model:
        """Return the model as `config` loads it."""
        traced = traced_settings(config)
        if traced not in self.traced:
            self.traced[traced] = inspect_model(config)
        counted = config.model.model_dump_json() + traced
        if counted not in self.counted:
            self.counted[counted] = with_weights(config, self.traced[traced])
        model = self.counted[counted]
        if config.memory.activation_offloading and not self.offloads:
            return replace(model, activations=model.activations.offloaded())
        return model


def traced_settings(config: RunConfig) -> str:
    """Return a key of the settings that decide a step's activations, among the suggested changes.

    Quantization is ignored, since weights are traced in 16 bits.
    """
    quantization = {"load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"}
    return config.model.model_dump_json(exclude=quantization) + str(config.memory.gradient_checkpointing)


def setups(config: RunConfig, hardware: Hardware, models: Models) -> list[Setup]:
    """Return every sharding with each of the savings, sorted by `Setup.order`."""
    found = [each for changes in savings(config) for each in with_shardings(config, changes, hardware, models)]
    return sorted(found, key=lambda each: each.order)


def savings(config: RunConfig) -> Iterator[Changes]:
    """Yield no change, then changes of one setting each that trade time for memory, then LoRA and QLoRA."""
    model, memory = config.model, config.memory
    yield {}
    yield {"memory.gradient_checkpointing": not memory.gradient_checkpointing}
    for optim in ("adamw_torch", "adamw_8bit", "adafactor"):
        if optim != config.train.optim:
            yield {"train.optim": optim}
    if not model.freeze_vision_tower and model.trainable_modules is None:
        yield {"model.freeze_vision_tower": True}
    if not memory.activation_offloading:
        yield {"memory.activation_offloading": True}
    if "vllm_enable_sleep_mode" in config.rollout.facts.reads:
        yield {"vllm.vllm_enable_sleep_mode": not config.vllm.vllm_enable_sleep_mode}
    yield from adapters(config)


def adapters(config: RunConfig) -> Iterator[Changes]:
    """Yield the change to LoRA, then to QLoRA. Leave out a change that the run has already."""
    changes: Changes = {}
    if not config.model.use_peft:
        changes = {"model.use_peft": True, "model.freeze_vision_tower": True}
        if config.model.trainable_modules is not None:
            changes["model.trainable_modules"] = None
        yield changes
    if not config.model.load_in_4bit:
        changes = changes | {"model.load_in_4bit": True}
        if not config.rollout.facts.samples_4_bit_weights:
            (changes["rollout.engine"], *_) = engines_where(lambda each: each.samples_4_bit_weights)
        yield changes


def with_shardings(config: RunConfig, changes: Changes, hardware: Hardware, models: Models) -> list[Setup]:
    """Plan the changed run with every sharding that accepts it. On one GPU, shards help only if they are offloaded."""
    is_one = hardware.num_ranks == 1
    tried = [each for each in SHARDINGS.values() if not (is_one and each.shards_state) or each.offloads]
    found = [setup(config, changes, replace(hardware, sharding=sharding), models) for sharding in tried]
    return [each for each in found if each]


def setup(config: RunConfig, changes: Changes, hardware: Hardware, models: Models) -> Setup | None:
    """Plan a run with changed settings, and adapt them if that makes the run fit. Returns None if the run refuses
    them."""
    try:
        setup_problems(with_changes(config, changes), hardware.sharding, hardware.num_ranks).refuse()
    except (ValidationError, RLVLMError):
        return None
    model = models.of(with_changes(config, changes))
    tried = list(adapted(config, changes, hardware, model))
    changes, plan = next((each for each in tried if each[1].fits), tried[0])
    changed = with_changes(config, changes)
    together, seconds = completions_together(changed, model, plan), step_seconds(changed, hardware, plan, model)
    return Setup(changes, hardware, plan, together, seconds)


def adapted(
    config: RunConfig, changes: Changes, hardware: Hardware, model: Model
) -> Iterator[tuple[Changes, MemoryPlan]]:
    """Yield the changes with their plan: as they are, with other fractions for vLLM, and with smaller micro-batches."""

    def planned(more: Changes) -> tuple[Changes, MemoryPlan]:
        return changes | more, plan_memory(with_changes(config, changes | more), hardware, model)

    tried = [planned({})]
    yield tried[0]
    changed = with_changes(config, changes)
    if changed.rollout.facts.reserves_memory:
        least, enough, most = vllm_fractions(changed, model, tried[0][1]).values()
        most = math.floor(100 * min(most, enough)) / 100
        tried += [planned({"vllm.vllm_gpu_memory_utilization": each}) for each in (most, least) if least <= each <= 1]
    yield from tried[1:]
    for more, plan in tried:
        if single_completion(changed, model) <= plan.largest_tokens < plan.micro_batch_tokens:
            yield planned(more | {"memory.micro_batch_tokens": plan.largest_tokens})


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """Apply changes to the settings, and drop the settings that then have no effect."""
    given = config.model_dump(exclude_unset=True)
    settings = {f"{section}.{leaf}": value for section, values in given.items() for leaf, value in values.items()}
    unread = [name for name in unread_settings(settings | changes) if name not in changes]
    return RunConfig.model_validate(by_section({k: v for k, v in (settings | changes).items() if k not in unread}))


def smallest(config: RunConfig, hardware: Hardware, models: Models) -> list[Setup]:
    """Return the smallest set-ups that fit, fewest GPUs first; an empty list if none fits.

    Each way to train of `weaker` is tried on the hardware itself, then on twice as many GPUs at a time. It adds a
    set-up only if it needs fewer GPUs than the ways before it. The first sharding by `Setup.order` is chosen.
    """
    found: list[Setup] = []
    for changes in weaker(config):
        for larger in more_gpus(hardware, found[-1].hardware.num_ranks if found else None):
            ways = with_shardings(config, changes | more_prompts(config, larger), larger, models)
            if fitting := [each for each in ways if each.plan.fits]:
                found.append(min(fitting, key=lambda each: each.order))
                break
    return found[::-1]


def weaker(config: RunConfig) -> Iterator[Changes]:
    """Yield changes that save memory: first gradient checkpointing alone, then LoRA as well, then QLoRA."""
    changes: Changes = {"memory.gradient_checkpointing": True}
    yield changes
    yield from (changes | more for more in adapters(config))


def more_gpus(hardware: Hardware, below: int | None) -> Iterator[Hardware]:
    """Yield the hardware, then more GPUs up to 8 per node, then more nodes up to 64. Skip `below` GPUs and more."""
    sizes = [(hardware.gpus, hardware.nodes)]
    while sizes[-1][0] < GPUS_OF_NODE:
        sizes.append((min(2 * sizes[-1][0], GPUS_OF_NODE), hardware.nodes))
    while 2 * sizes[-1][1] <= MAX_NODES:
        sizes.append((sizes[-1][0], 2 * sizes[-1][1]))
    for gpus, nodes in sizes:
        if below is None or gpus * nodes < below:
            yield replace(hardware, gpus=gpus, nodes=nodes)


def more_prompts(config: RunConfig, hardware: Hardware) -> Changes:
    """Return the change that raises `prompts_per_step` to a multiple of the ranks, if it is not one yet."""
    prompts, ranks = config.train.prompts_per_step, hardware.num_ranks
    return {"train.prompts_per_step": math.ceil(prompts / ranks) * ranks} if prompts and prompts % ranks else {}
