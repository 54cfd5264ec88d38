"""Checks that need no rows: settings, reward functions, output directory, engine and model files."""

from __future__ import annotations

from rl_vlm.config.batches import BatchSizes, batch_sizes
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import Finding
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.dry_run import check_around_data, check_rewards

TEMPERATURES = (0.3, 1.5)
"""Usual range. Below it, the completions of a group are nearly equal; above it, they are mostly noise."""
LARGE_MODEL = 100_000_000
"""A model with more parameters than this counts as pretrained."""
LARGEST_RATES = {False: 1e-4, True: 1e-3}
"""Largest usual learning rate, by `use_peft`. Above it, a pretrained model is likely to diverge."""


def check_settings(config: RunConfig, diagnosis: Diagnosis) -> tuple[list[RewardSuite], BatchSizes | None]:
    """Check the settings. Returns a suite for each reward function that loads, and the batch plan or None."""
    found, plan = Diagnosis(), None
    with found.noting():
        check_trainable(config)
    with found.noting():
        plan = batch_sizes(config, 1)
    suites = check_rewards(config.rewards, found)
    check_around_data(config, found)
    diagnosis.findings += [*unusual_temperature(config), *found.findings]
    diagnosis.checked += found.checked  # without `not_checked`: later checks cover it
    return suites, plan


def unusual_temperature(config: RunConfig) -> list[Finding]:
    """Return a finding if completions are sampled at an unusual temperature."""
    temperature, (low, high) = config.rollout.temperature, TEMPERATURES
    if low <= temperature <= high:
        return []
    why = "completions of a group are nearly equal" if temperature < low else "completions are mostly noise"
    what = f"rollout.temperature is {temperature:g}, outside {low:g} to {high:g}: {why}, so that groups teach little"
    return [Finding("warning", "sampling temperature", what, "Set rollout.temperature to about 1.")]


def high_learning_rate(config: RunConfig, num_parameters: int) -> list[Finding]:
    """Return a finding if the learning rate is too high for a pretrained model."""
    has_lora, rate = config.model.use_peft, config.train.learning_rate
    largest = LARGEST_RATES[has_lora]
    if num_parameters <= LARGE_MODEL or rate <= largest:
        return []
    what = (
        f"train.learning_rate is {rate:g}, and the model has {num_parameters / 1e6:.0f}M parameters: above {largest:g} "
        f"{'an adapter' if has_lora else 'full training'} is likely to diverge"
    )
    usual = "1e-5 to 1e-4" if has_lora else "about 1e-6"
    return [Finding("warning", "learning rate", what, f"Set train.learning_rate to {usual}, or start from there.")]
