"""The batch settings of a run as numbers: solve them, or find the nearest values that have a solution.

    prompts_per_step × num_generations = per_device_train_batch_size × gradient_accumulation_steps × processes
    prompts_per_step = processes × whole prompts
    steps_per_generation = gradient_accumulation_steps × whole optimizer steps

Example: 6 prompts per step cannot be shared among 4 processes. The nearest valid values are 4 or 8 prompts, or 3 or 6
processes.
"""

from collections.abc import Iterator
from itertools import combinations, islice
from typing import NamedTuple

from rl_vlm.config.trl_fields import TRL_PER_DEVICE_BATCH_SIZE
from rl_vlm.errors import ConfigError

DEFAULTS = {"per_device_train_batch_size": TRL_PER_DEVICE_BATCH_SIZE, "gradient_accumulation_steps": 1}
"""Defaults of TRL's settings if `prompts_per_step` is not given."""

OPTIONAL = ("steps_per_generation", "gradient_accumulation_steps", "per_device_train_batch_size")
"""Settings that a suggestion may leave out, the first one first."""

TRIED = (
    "prompts_per_step", "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "world_size",
    "steps_per_generation",
)  # fmt: skip
"""Settings for which a suggestion tries other values, in the order of the message."""

MOST_TRIED = 4096
"""Neighbours of a value that are tried below it, and above it."""


class BatchSettings(NamedTuple):
    """The settings that have to agree. None: not given. Any `num_iterations` agrees with them."""

    num_generations: int
    world_size: int
    prompts_per_step: int | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    steps_per_generation: int | None = None


class Solution(NamedTuple):
    """Values of the settings that were not given."""

    prompts_per_step: int
    gradient_accumulation_steps: int
    steps_per_window: int
    """Optimizer steps of one generation window."""


NewValues = dict[str, int | None]
"""New values of some settings. None: leave the setting out."""


def solve(settings: BatchSettings) -> Solution:
    """Solve the settings for those that are not given.

    Raises ConfigError with the nearest valid values if there is no solution.
    """
    solution = _solve(settings)
    if isinstance(solution, Solution):
        return solution
    changes = " or ".join(_describe(change) for change in nearest_valid(settings))
    raise ConfigError(f"{solution}; nearest valid: {changes}" if changes else solution)


def nearest_valid(settings: BatchSettings) -> list[NewValues]:
    """Return changes that give settings a solution. The list is empty if all valid values are far away.

    Each change sets one setting to its nearest valid value below or above. If that is not enough, it also leaves out as
    few settings of `OPTIONAL` as possible.
    """
    given = [name for name in OPTIONAL if getattr(settings, name) is not None]
    for num_left_out in range(len(given) + 1):
        for names in combinations(given, num_left_out):
            left_out: NewValues = dict.fromkeys(names)
            kept = settings._replace(**left_out)
            changes = [left_out] if _is_valid(kept) else [left_out | change for change in _nearest_values(kept)]
            if changes:
                return changes
    return []


def _nearest_values(settings: BatchSettings) -> Iterator[NewValues]:
    """Try other values of one setting at a time. Yield the nearest valid ones below and above.

    Values up to twice the largest setting are tried, and at most `MOST_TRIED` on each side.
    """
    defaults = DEFAULTS if settings.prompts_per_step is None else {}
    largest = 2 * max(value for value in settings if value is not None)
    for name in TRIED:
        value = getattr(settings, name) or defaults.get(name)
        if value is None:
            continue
        least = 2 if name == "num_generations" else 1  # a group of one has no advantages
        for neighbours in (range(value - 1, least - 1, -1), range(value + 1, largest + 1)):
            valid = (other for other in neighbours[:MOST_TRIED] if _is_valid(settings._replace(**{name: other})))
            changes: list[NewValues] = [{name: other} for other in islice(valid, 1)]
            yield from changes


def _is_valid(settings: BatchSettings) -> bool:
    return isinstance(_solve(settings), Solution)


def _solve(settings: BatchSettings) -> Solution | str:
    """Return the solution, or the reason why there is none."""
    group, processes = settings.num_generations, settings.world_size
    per_device, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    prompts = settings.prompts_per_step
    if prompts is None:
        per_device, accumulation = per_device or DEFAULTS["per_device_train_batch_size"], accumulation or 1
        if (completions := per_device * accumulation) % group:
            return (
                f"`per_device_train_batch_size` {per_device} × `gradient_accumulation_steps` {accumulation} = "
                f"{completions} completions per process and step are not whole groups of `num_generations` {group}"
            )
        prompts = completions // group * processes
    elif prompts % processes:
        return f"`prompts_per_step` {prompts} cannot be shared equally among {processes} processes"
    completions = prompts // processes * group
    if completions % ((per_device or 1) * (accumulation or 1)) or (
        per_device and accumulation and per_device * accumulation != completions
    ):
        return (
            f"`prompts_per_step` {prompts} with `num_generations` {group} makes {completions} completions per process "
            f"and step, which are not {_product_text(per_device, accumulation)}"
        )
    accumulation = completions // per_device if per_device else accumulation or 1
    micro_steps = settings.steps_per_generation or accumulation
    if micro_steps % accumulation:
        return (
            f"`steps_per_generation` {micro_steps} is not a whole number of optimizer steps of {accumulation} "
            "micro-steps (`gradient_accumulation_steps`)"
        )
    return Solution(prompts, accumulation, micro_steps // accumulation)


def _product_text(per_device: int | None, accumulation: int | None) -> str:
    """Describe the number of completions that TRL's two settings ask for."""
    if per_device and accumulation:
        return (
            f"`per_device_train_batch_size` {per_device} × `gradient_accumulation_steps` {accumulation} = "
            f"{per_device * accumulation}"
        )
    name = "per_device_train_batch_size" if per_device else "gradient_accumulation_steps"
    return f"a multiple of `{name}` {per_device or accumulation}"


def _describe(change: NewValues) -> str:
    """Describe a change: "`prompts_per_step` 4 without `steps_per_generation`"."""
    left_out = " and ".join(f"`{name}`" for name, value in change.items() if value is None)
    values = [
        f"{value} process{'es' * (value != 1)}" if name == "world_size" else f"`{name}` {value}"
        for name, value in change.items()
        if value is not None
    ]
    return " ".join([*values, *([f"without {left_out}"] if left_out else [])]) if values else f"no {left_out}"
