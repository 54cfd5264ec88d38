"""The global batch of a run as `rl-vlm plan` prints it, and the batches with other G and other numbers of GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass

from rl_vlm.config.batch_settings import BatchSettings, Solution, solve
from rl_vlm.config.batches import BatchPlan
from rl_vlm.errors import ConfigError


def global_batch(plan: BatchPlan, num_nodes: int = 1) -> str:
    """Return one line with the completions of an optimizer step as per-device × accumulation × ranks."""
    ranks = f"{plan.world_size} ranks"
    if num_nodes > 1:
        ranks = f"{plan.world_size // num_nodes} ranks × {num_nodes} nodes"
    return (
        f"global batch = {plan.per_device_train_batch_size} per device × {plan.gradient_accumulation_steps} "
        f"accumulation × {ranks} = {plan.completions_per_step} completions = {plan.prompts_per_step} prompts × "
        f"{plan.num_generations} generations"
    )


@dataclass(frozen=True)
class BatchChange:
    """The batch after one setting is changed and all others are kept."""

    num_generations: int
    world_size: int
    prompts_per_step: int | None
    """None if the settings have no solution. Then `refusal` has the reason."""
    prompts_per_rank: int | None
    refusal: str = ""

    @property
    def completions_per_step(self) -> int | None:
        return None if self.prompts_per_step is None else self.prompts_per_step * self.num_generations


def batch_changes(settings: BatchSettings) -> list[BatchChange]:
    """Return the batch of the settings, then with half and twice G, then with half, one less, one more and twice the
    ranks.
    """
    group, ranks = settings.num_generations, settings.world_size
    groups = sorted({group // 2, 2 * group} - {0, 1})
    counts = sorted({ranks // 2, ranks - 1, ranks + 1, 2 * ranks} - {0})
    changed = [settings._replace(num_generations=value) for value in groups]
    changed += [settings._replace(world_size=value) for value in counts]
    return [_changed(one) for one in [settings, *changed]]


def batch_table(settings: BatchSettings) -> Iterator[str]:
    """Yield the lines of `batch_changes` as a table."""
    yield f"{'G':>4} {'ranks':>6} {'prompts':>8} {'completions':>12} {'prompts per rank':>17}"
    for change in batch_changes(settings):
        line = f"{change.num_generations:>4} {change.world_size:>6}"
        if change.refusal:
            yield f"{line}  refused: {change.refusal}"
        else:
            yield f"{line} {change.prompts_per_step:>8} {change.completions_per_step:>12} {change.prompts_per_rank:>17}"


def _changed(settings: BatchSettings) -> BatchChange:
    group, ranks = settings.num_generations, settings.world_size
    try:
        solution: Solution = solve(settings)
    except ConfigError as error:
        return BatchChange(group, ranks, None, None, str(error))
    return BatchChange(group, ranks, solution.prompts_per_step, solution.prompts_per_step // ranks)
