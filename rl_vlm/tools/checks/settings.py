"""Checks of settings, and of the functions and packages that they name. This module imports no torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator

from rl_vlm.algorithm.own_loss import load_loss
from rl_vlm.config.batches import BatchSizes, batch_sizes
from rl_vlm.config.engines import engines_where
from rl_vlm.config.function_source import read_source
from rl_vlm.config.load import check_evaluable, check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, Finding, require_bitsandbytes
from rl_vlm.reward.function import Reward
from rl_vlm.reward.suite import check_names
from rl_vlm.tools.checks.diagnosis import SETTING, Checking, Note, attempt_call, calling
from rl_vlm.tools.checks.table import Subject

TEMPERATURES = (0.3, 1.5)
"""Usual range. Below it, the completions of a group are nearly equal; above it, they are mostly noise."""
LARGE_MODEL = 100_000_000
"""A model with more parameters than this counts as pretrained."""
LARGEST_RATES = {False: 1e-4, True: 1e-3}
"""Largest usual learning rate, by `use_peft`. Above it, a pretrained model is likely to diverge."""


def needed_settings(subject: Subject) -> Checking[None]:
    """Check that the settings that this kind of run needs are there."""
    return calling(check_trainable if subject.kind == "train" else check_evaluable, subject.config)


def batches(subject: Subject) -> Checking[BatchSizes]:
    """Compute the batch sizes for as many processes as the launcher has started."""
    return calling(batch_sizes, subject.config, int(os.environ.get("WORLD_SIZE", "1")))


def sampling_temperature(subject: Subject) -> Checking[None]:
    """Yield a finding if completions are sampled at an unusual temperature."""
    temperature, (low, high) = subject.config.rollout.temperature, TEMPERATURES
    if not low <= temperature <= high:
        why = "completions of a group are nearly equal" if temperature < low else "completions are mostly noise"
        what = (
            f"rollout.temperature is {temperature:g}, outside {low:g} to {high:g}: {why}, so that groups teach little"
        )
        yield Finding("warning", "sampling temperature", what, "Set rollout.temperature to about 1.")


def high_learning_rate(config: RunConfig, num_parameters: int) -> Checking[None]:
    """Yield a finding if the learning rate is too high for a pretrained model."""
    has_lora, rate = config.model.use_peft, config.train.learning_rate
    largest = LARGEST_RATES[has_lora]
    if num_parameters > LARGE_MODEL and rate > largest:
        what = (
            f"train.learning_rate is {rate:g}, and the model has {num_parameters / 1e6:.0f}M parameters: above "
            f"{largest:g} {'an adapter' if has_lora else 'full training'} is likely to diverge"
        )
        usual = "1e-5 to 1e-4" if has_lora else "about 1e-6"
        yield Finding("warning", "learning rate", what, f"Set train.learning_rate to {usual}, or start from there.")


def rewards(subject: Subject) -> Checking[list[Reward]]:
    """Load every reward function. Return the functions that load."""
    specs, loaded = subject.config.rewards.specs, []
    for spec in specs:
        reward = yield from attempt_call(SETTING, Reward, spec, subject.config.rollout.environment is not None)
        loaded += [reward] if reward is not None else []
    names = [reward.name for reward in loaded]
    yield from attempt_call(SETTING, check_names, names)
    if subject.config.rollout.has_tools:
        yield from first_turns(loaded)
    if names:
        yield Note(f"reward functions {', '.join(names)}")
    if any(spec.timeout for spec in specs):
        yield from subject.left_out("reward functions with a timeout in a process of their own")
    return loaded


def first_turns(functions: Iterable[Reward]) -> Iterator[Finding]:
    """Yield a finding for each function that reads the first turn of a completion of several turns."""
    for reward in functions:
        source = read_source(reward.spec.function)
        if source is not None and source.reads_first_message:
            named = reward.spec.function
            what = f"reward function {named} reads `completion[0]`, the first turn of a completion with tools"
            remedy = "Read `completion[-1]`, the last message."
            yield Finding("warning", "first turn", what, remedy, function=reward.name)


def token_loss(subject: Subject) -> Checking[None]:
    """Load the user's token loss, if there is one."""
    name = subject.config.algorithm.loss_type
    if subject.config.algorithm.has_own_loss:
        load_loss(name)
        yield Note(f"token loss {name}")
        yield from subject.left_out("what the token loss returns")


def packages(subject: Subject) -> Checking[None]:
    """Check that the packages that the optimizer, the quantization and the engine need are installed."""
    config = subject.config
    engine, urls = config.rollout.facts, config.vllm.vllm_server_base_url
    if subject.is_served:
        return
    if subject.kind == "train" and config.train.optim == "adamw_8bit":
        yield from attempt_call(SETTING, require_bitsandbytes, "train.optim: adamw_8bit")
    if config.model.load_in_4bit:
        yield from attempt_call(SETTING, require_bitsandbytes, "model.load_in_4bit")
    if urls and engine.uses_servers:
        yield from subject.left_out(f"servers at {', '.join(urls)}")
    elif engine.package is not None and importlib.util.find_spec(engine.package) is None:
        others = " or ".join(engines_where(lambda other: other.package is None))
        raise ConfigError(
            f"rollout.engine is {config.rollout.engine}, and {engine.title} is not installed; install it, or use "
            f"{others}"
        )
