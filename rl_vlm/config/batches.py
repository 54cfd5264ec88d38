"""The number of prompts and completions of a step, on all processes and on each.

    prompts_per_step × num_generations = per_device_train_batch_size × gradient_accumulation_steps × processes

`prompts_per_step` alone is enough. Only the product per-device × accumulation matters. It must hold whole groups,
because a group is never split between processes. A window holds the prompts of `steps_per_window` optimizer steps; it
is generated at once and trained on `num_iterations` times.

Example: 4 prompts per step, G = 8, 2 processes, 2 steps per window, 3 iterations:

    step    4 prompts, 32 completions; 2 prompts, 16 completions on each process
    window  8 prompts, 64 completions, generated once; 6 optimizer steps
"""

import math
from dataclasses import dataclass

from rl_vlm.config.batch_settings import BatchSettings, solve
from rl_vlm.config.schema import RunConfig, TrainConfig
from rl_vlm.config.trl_fields import TRL_PER_DEVICE_BATCH_SIZE
from rl_vlm.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """The logical batch. It does not determine memory use: `micro_batch_tokens` sets the size of micro-batches."""

    prompts_per_step: int
    """Prompts of one optimizer step, over all processes."""
    num_generations: int
    world_size: int
    gradient_accumulation_steps: int
    """Micro-steps per optimizer step as TRL counts them; it only affects `steps_per_generation`."""
    steps_per_window: int
    """Optimizer steps of one pass over a window."""
    num_iterations: int
    """Passes over each window."""

    @property
    def completions_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations

    @property
    def prompts_per_window(self) -> int:
        return self.prompts_per_step * self.steps_per_window

    @property
    def per_device_train_batch_size(self) -> int:
        return self.completions_per_step // (self.world_size * self.gradient_accumulation_steps)

    @property
    def prompts_per_rank_step(self) -> int:
        return self.prompts_per_step // self.world_size


def batch_sizes(config: RunConfig, world_size: int) -> BatchSizes:
    """Compute the batches of `config` on `world_size` processes.

    Raises ConfigError with the nearest valid values if the settings have no solution in whole groups.
    """
    settings = batch_settings(config, world_size)
    solution = solve(settings)
    return BatchSizes(
        prompts_per_step=solution.prompts_per_step,
        num_generations=settings.num_generations,
        world_size=world_size,
        gradient_accumulation_steps=solution.gradient_accumulation_steps,
        steps_per_window=solution.steps_per_window,
        num_iterations=config.algorithm.num_iterations,
    )


def batch_settings(config: RunConfig, world_size: int) -> BatchSettings:
    """Return the settings of `config` that have to agree on `world_size` processes."""
    train = config.train
    return BatchSettings(
        num_generations=config.rollout.num_generations,
        world_size=world_size,
        prompts_per_step=train.prompts_per_step,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        steps_per_generation=train.steps_per_generation,
    )


def settings_that_keep(prompts: int, steps: int, config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the settings to change so that `batch_sizes` makes the same batch on `world_size` processes.

    The batch is given as prompts per step and steps per window. Returns nothing if the prompts cannot be shared.
    """
    train, completions = config.train, prompts // world_size * config.rollout.num_generations
    if prompts % world_size:
        return {}
    per_device, accumulation = None, math.gcd(train.gradient_accumulation_steps or 1, completions)
    if train.prompts_per_step is None or train.per_device_train_batch_size is not None:
        per_device = math.gcd(train.per_device_train_batch_size or TRL_PER_DEVICE_BATCH_SIZE, completions)
        accumulation = completions // per_device
    present_and_wanted = {
        "prompts_per_step": (train.prompts_per_step, train.prompts_per_step and prompts),
        "per_device_train_batch_size": (train.per_device_train_batch_size or TRL_PER_DEVICE_BATCH_SIZE, per_device),
        "gradient_accumulation_steps": (train.gradient_accumulation_steps or 1, accumulation),
        "steps_per_generation": (train.steps_per_generation or accumulation, steps * accumulation),
    }
    return {name: value for name, (present, value) in present_and_wanted.items() if value and value != present}


def total_optimizer_steps(config: RunConfig, sizes: BatchSizes, num_rows: int) -> int:
    """Return the optimizer steps of the run: `max_steps`, or `num_train_epochs` over `num_rows` rows in whole windows.

    If the rows do not fill the last window, it is completed from the next epoch. Raises ConfigError if there are fewer
    rows than prompts of one window.
    """
    if num_rows < sizes.prompts_per_window:
        raise ConfigError(
            f"the training data have {num_rows} rows, fewer than the {sizes.prompts_per_window} prompts of one "
            f"generation window ({sizes.steps_per_window} × {sizes.prompts_per_step}); use more rows, or "
            f"{_smaller_window(config, sizes, num_rows)}"
        )
    if config.train.max_steps is not None:
        return config.train.max_steps
    num_windows = math.ceil(round(config.train.num_train_epochs * num_rows / sizes.prompts_per_window, 6))
    return num_windows * sizes.steps_per_window * sizes.num_iterations


def warmup_steps(setting: float, num_steps: int) -> int:
    """Return the warm-up steps of a run of `num_steps`, rounded as in transformers.

    A setting below 1 is a fraction of the steps, rounded up; any other is a number of steps, rounded down.
    """
    return int(setting) if setting >= 1 else math.ceil(num_steps * setting)


def endless_warmup(train: TrainConfig, num_steps: int) -> str | None:
    """Return a warning if a run of `num_steps` ends within its warm-up, else None."""
    warmup = warmup_steps(train.warmup_steps, num_steps)
    if warmup <= num_steps:
        return None
    return (
        f"train.warmup_steps {warmup} is longer than the run of {num_steps} optimizer steps: the learning rate never "
        "reaches its peak"
    )


def _smaller_window(config: RunConfig, sizes: BatchSizes, num_rows: int) -> str:
    """Describe the change to the largest window that `num_rows` rows fill: fewer prompts per step, else fewer steps."""
    if num_rows < sizes.world_size:
        return f"at most {num_rows} processes"
    steps = min(sizes.steps_per_window, num_rows // sizes.world_size)
    prompts = num_rows // (steps * sizes.world_size) * sizes.world_size
    changes = settings_that_keep(prompts, steps, config, sizes.world_size)
    return " and ".join(f"`{name}` {value}" for name, value in changes.items())
