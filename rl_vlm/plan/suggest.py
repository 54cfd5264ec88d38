"""`rl-vlm plan --suggest`: set-ups that fit, the fastest first, and the smallest one if none does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_vlm.config.batches import plan_batches
from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.build import Hardware, Model, inspect_model, plan_memory, single_completion
from rl_vlm.plan.engines import ENGINES
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.speed import Step, step_seconds

MAX_NODES = 64
"""The largest number of machines of 8 GPUs that is tried."""
GPUS_OF_NODE = 8


@dataclass(frozen=True)
class Setup:
    """One way to run the same training, with its plan."""

    changes: dict[str, Any]
    """Settings that differ from the run's."""
    hardware: Hardware
    plan: MemoryPlan
    seconds: float
    """Estimated, of an optimizer step without rollouts."""

    @property
    def name(self) -> str:
        settings = [f"{key}={str(value).lower()}" for key, value in self.changes.items()]
        return ", ".join([self.hardware.engine.name, *settings])


class Models:
    """Traced models, each of which is traced once."""

    def __init__(self, config: RunConfig, hardware: Hardware) -> None:
        self.prompts_per_step = plan_batches(config, hardware.num_ranks).prompts_per_step
        self.traced: dict[str, Model] = {}

    def of(self, config: RunConfig) -> Model:
        """Return the model as `config` loads it."""
        key = config.model.model_dump_json() + str(config.memory.gradient_checkpointing) + str(config.algorithm.beta)
        if key not in self.traced:
            self.traced[key] = inspect_model(config)
        return self.traced[key]


def setups(config: RunConfig, hardware: Hardware, models: Models) -> list[Setup]:
    """Return every engine with and without gradient checkpointing: those that fit, the fastest first, then the rest."""
    found = [
        setup(config, changes, replace(hardware, engine=engine), models)
        for changes in ({}, {"memory.gradient_checkpointing": not config.memory.gradient_checkpointing})
        for engine in ENGINES.values()
        if engine.name == "ddp" or hardware.num_ranks > 1 or engine.offloads
    ]
    fitting = sorted((each for each in found if each.plan.fits), key=lambda each: each.seconds)
    others = sorted((each for each in found if not each.plan.fits), key=lambda each: each.plan.peak.total)
    return fitting + others


def setup(config: RunConfig, changes: dict[str, Any], hardware: Hardware, models: Models) -> Setup:
    """Plan a run with other settings, and with smaller micro-batches if that makes it fit."""
    changed = with_changes(config, changes)
    model = models.of(changed)
    plan = plan_memory(changed, hardware, model)
    largest = plan.largest_tokens
    if not plan.fits and single_completion(changed, model) <= largest < plan.micro_batch_tokens:
        changes = changes | {"memory.micro_batch_tokens": largest}
        changed = with_changes(config, changes)
        plan = plan_memory(changed, hardware, model)
    step = work_of_step(changed, plan, model, models.prompts_per_step)
    recomputes = changed.memory.gradient_checkpointing in (True, "language_model")
    return Setup(changes, hardware, plan, step_seconds(plan, step, hardware.nodes, recomputes))


def with_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Return the settings with some of them changed, by their dotted names."""
    data = config.model_dump(exclude_unset=True)
    for key, value in changes.items():
        section, name = key.split(".")
        data.setdefault(section, {})[name] = value
    return RunConfig.model_validate(data)


def work_of_step(config: RunConfig, plan: MemoryPlan, model: Model, prompts_per_step: int) -> Step:
    """Return the work of a rank in a step, if completions have half of their longest length."""
    completions = config.rollout.num_generations * config.rollout.max_completion_length // 2
    tokens = math.ceil(prompts_per_step / plan.num_ranks) * (model.prompt_tokens + completions)
    return Step(tokens, math.ceil(tokens / plan.load.tokens))


def smallest(config: RunConfig, hardware: Hardware, models: Models) -> Setup | None:
    """Return the set-up with the fewest GPUs of this card that fits, with the cheapest change of what is trained."""
    for changes in weaker(config):
        for larger in more_gpus(hardware):
            fitting = [
                found
                for engine in ENGINES.values()
                if (found := setup(config, changes, replace(larger, engine=engine), models)).plan.fits
            ]
            if fitting:
                return min(fitting, key=lambda each: each.seconds)
    return None


def weaker(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield changes that save memory: none of what is trained first, then LoRA, then QLoRA."""
    changes: dict[str, Any] = {"memory.gradient_checkpointing": True}
    yield changes
    if not config.model.use_peft:
        changes |= {"model.use_peft": True, "model.freeze_vision_tower": True}
        yield changes
    if not config.model.load_in_4bit:  # vLLM has no weights in 4 bits
        yield changes | {"model.load_in_4bit": True, "rollout.engine": "hf", "vllm.vllm_enable_sleep_mode": False}


def more_gpus(hardware: Hardware) -> Iterator[Hardware]:
    """Yield hardware with as many GPUs and with more of them."""
    gpus = hardware.gpus
    while gpus < GPUS_OF_NODE and hardware.nodes == 1:
        yield replace(hardware, gpus=gpus)
        gpus *= 2
    nodes = hardware.nodes
    while nodes <= MAX_NODES:
        yield replace(hardware, gpus=max(gpus, hardware.gpus), nodes=nodes)
        nodes *= 2


def suggestions(config: RunConfig, hardware: Hardware) -> Sequence[Setup]:
    """Return the set-ups of `setups`; if none fits, followed by the smallest one that does, if there is one."""
    models = Models(config, hardware)
    found = setups(config, hardware, models)
    if not found[0].plan.fits and (fitting := smallest(config, hardware, models)):
        found.append(fitting)
    return found
