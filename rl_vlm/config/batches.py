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

from rl_vlm.config.schema import RunConfig, TrainConfig
from rl_vlm.config.trl_fields import TRL_PER_DEVICE_BATCH_SIZE
from rl_vlm.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
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
    def prompts_per_rank_step(self) -> int:
        return self.prompts_per_step // self.world_size


def plan_batches(config: RunConfig, world_size: int) -> BatchPlan:
    """Compute the batches of `config` on `world_size` processes.

    Raises ConfigError with the nearest valid values if the settings have no solution in whole groups.
    """
    group, train = config.rollout.num_generations, config.train
    if train.prompts_per_step is None:
        prompts_per_rank, accumulation = _from_device_batch(train, group)
    else:
        prompts_per_rank = _share_prompts(train.prompts_per_step, world_size)
        accumulation = _split_completions(train, prompts_per_rank * group)
    micro_steps = train.steps_per_generation or accumulation
    if micro_steps % accumulation:
        raise ConfigError(
            f"`steps_per_generation` {micro_steps} is not a whole number of optimizer steps of {accumulation} "
            f"micro-steps (`gradient_accumulation_steps`); nearest valid: {_multiples(micro_steps, accumulation)}"
        )
    return BatchPlan(
        prompts_per_step=prompts_per_rank * world_size,
        num_generations=group,
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        steps_per_window=micro_steps // accumulation,
        num_iterations=config.algorithm.num_iterations,
    )


def settings_that_keep(prompts: int, steps: int, config: RunConfig, world_size: int) -> dict[str, int]:
    """Return the settings to change so that `plan_batches` makes the same batch on `world_size` processes.

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


def total_optimizer_steps(config: RunConfig, plan: BatchPlan, num_rows: int) -> int:
    """Return the optimizer steps of the run: `max_steps`, or `num_train_epochs` over `num_rows` rows in whole windows.

    If the rows do not fill the last window, it is completed from the next epoch. Raises ConfigError if there are fewer
    rows than prompts of one window.
    """
    if num_rows < plan.prompts_per_window:
        largest = num_rows // (plan.steps_per_window * plan.world_size) * plan.world_size
        way_out = f"`prompts_per_step` of at most {largest}" if largest else "fewer processes or steps per generation"
        raise ConfigError(
            f"the training data have {num_rows} rows, fewer than the {plan.prompts_per_window} prompts of one "
            f"generation window ({plan.steps_per_window} × {plan.prompts_per_step}); use more rows, or {way_out}"
        )
    if config.train.max_steps is not None:
        return config.train.max_steps
    num_windows = math.ceil(round(config.train.num_train_epochs * num_rows / plan.prompts_per_window, 6))
    return num_windows * plan.steps_per_window * plan.num_iterations


def _from_device_batch(train: TrainConfig, group: int) -> tuple[int, int]:
    """Compute the prompts per process and the accumulation from TRL's two settings."""
    per_device = train.per_device_train_batch_size or TRL_PER_DEVICE_BATCH_SIZE
    accumulation = train.gradient_accumulation_steps or 1
    completions = per_device * accumulation
    if completions % group:
        groups = _divisors(group, completions, smallest=2)
        raise ConfigError(
            f"`per_device_train_batch_size` {per_device} × `gradient_accumulation_steps` {accumulation} = "
            f"{completions} completions per process and step are not whole groups of `num_generations` {group}; "
            f"nearest valid: "
            f"`per_device_train_batch_size` {_multiples(per_device, group // math.gcd(group, accumulation))}, "
            f"or `gradient_accumulation_steps` {_multiples(accumulation, group // math.gcd(group, per_device))}"
            f"{f', or `num_generations` {groups}' if groups else ''}; or give `prompts_per_step` alone"
        )
    return completions // group, accumulation


def _share_prompts(prompts_per_step: int, world_size: int) -> int:
    if prompts_per_step % world_size:
        raise ConfigError(
            f"`prompts_per_step` {prompts_per_step} cannot be shared equally among {world_size} processes; "
            f"nearest valid: {_multiples(prompts_per_step, world_size)}"
        )
    return prompts_per_step // world_size


def _split_completions(train: TrainConfig, completions: int) -> int:
    """Return the micro-steps into which TRL's settings, if given, split the `completions` of a process and step."""
    per_device, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    if per_device and accumulation and per_device * accumulation != completions:
        raise ConfigError(
            f"`prompts_per_step` {train.prompts_per_step} makes {completions} completions per process and step, but "
            f"`per_device_train_batch_size` {per_device} × `gradient_accumulation_steps` {accumulation} = "
            f"{per_device * accumulation}; make that product {completions}, or leave both out"
        )
    given = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    for name, divisor in given.items():
        if divisor and completions % divisor:
            raise ConfigError(
                f"`{name}` {divisor} does not divide the {completions} completions per process and step that "
                f"`prompts_per_step` {train.prompts_per_step} makes; nearest valid: {_divisors(divisor, completions)}"
            )
    if per_device:
        return completions // per_device
    return accumulation or 1


def _multiples(value: int, step: int) -> str:
    """Return the multiples of `step` around `value`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def _divisors(value: int, total: int, smallest: int = 1) -> str:
    """Return the divisors of `total` around `value`."""
    divisors = [d for d in range(smallest, total + 1) if total % d == 0]
    below, above = [d for d in divisors if d < value][-1:], [d for d in divisors if d > value][:1]
    return " or ".join(map(str, below + above))
