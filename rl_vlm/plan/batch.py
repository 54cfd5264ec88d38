"""The global batch of a run as `rl-vlm plan` prints it, and the batches with other G and other numbers of GPUs."""

from collections.abc import Iterator

from rl_vlm.config.batch_settings import BatchSettings, solve
from rl_vlm.config.batches import BatchSizes
from rl_vlm.errors import ConfigError


def global_batch(sizes: BatchSizes, num_nodes: int = 1) -> str:
    """Return one line with the completions of an optimizer step as per-device × accumulation × ranks."""
    ranks = f"{sizes.world_size} ranks"
    if num_nodes > 1:
        ranks = f"{sizes.world_size // num_nodes} ranks × {num_nodes} nodes"
    return (
        f"global batch = {sizes.per_device_train_batch_size} per device × {sizes.gradient_accumulation_steps} "
        f"accumulation × {ranks} = {sizes.completions_per_step} completions = {sizes.prompts_per_step} prompts × "
        f"{sizes.num_generations} generations"
    )


def batch_table(settings: BatchSettings) -> Iterator[str]:
    """Yield a table of batches: of the settings, with half and twice G, then with half to twice the number of ranks.

    The other settings are kept.
    """
    group, ranks = settings.num_generations, settings.world_size
    changed = [settings]
    changed += [settings._replace(num_generations=value) for value in sorted({group // 2, 2 * group} - {0, 1})]
    changed += [
        settings._replace(world_size=value) for value in sorted({ranks // 2, ranks - 1, ranks + 1, 2 * ranks} - {0})
    ]
    yield f"{'G':>4} {'ranks':>6} {'prompts':>8} {'completions':>12} {'prompts per rank':>17}"
    for each in changed:
        line = f"{each.num_generations:>4} {each.world_size:>6}"
        try:
            prompts = solve(each).prompts_per_step
        except ConfigError as error:
            yield f"{line}  refused: {error}"
        else:
            yield f"{line} {prompts:>8} {prompts * each.num_generations:>12} {prompts // each.world_size:>17}"
