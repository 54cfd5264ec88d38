from rl_vlm.config.batch_settings import BatchSettings
from rl_vlm.config.batches import BatchSizes
from rl_vlm.plan.batch import batch_table, global_batch


def test_the_global_batch_as_a_product():
    plan = BatchSizes(
        prompts_per_step=32, num_generations=8, world_size=16, gradient_accumulation_steps=4, steps_per_window=1,
        num_iterations=1,
    )  # fmt: skip
    assert global_batch(plan) == (
        "global batch = 4 per device × 4 accumulation × 16 ranks = 256 completions = 32 prompts × 8 generations"
    )
    assert "× 8 ranks × 2 nodes = 256" in global_batch(plan, num_nodes=2)


def rows(settings: BatchSettings) -> list[list[str]]:
    return [line.split(maxsplit=5) for line in batch_table(settings)][1:]


def test_fixed_prompts_are_shared_by_more_ranks_or_refused():
    """Columns: G, ranks, prompts, completions, prompts per rank."""
    found = rows(BatchSettings(num_generations=4, world_size=6, prompts_per_step=12))
    assert found[:4] == [
        ["4", "6", "12", "48", "2"], ["2", "6", "12", "24", "2"], ["8", "6", "12", "96", "2"],
        ["4", "3", "12", "48", "4"],
    ]  # fmt: skip
    assert found[4][:3] == ["4", "5", "refused:"]
    assert "cannot be shared equally among 5 processes; nearest valid: `prompts_per_step` 10" in found[4][-1]
    assert found[-1] == ["4", "12", "12", "48", "1"]


def test_a_fixed_size_per_device_makes_the_batch_grow_with_the_ranks():
    found = rows(BatchSettings(4, 6, per_device_train_batch_size=4, gradient_accumulation_steps=1))
    assert {ranks: completions for group, ranks, _, completions, *_ in found if group == "4"} == {
        "3": "12", "5": "20", "6": "24", "7": "28", "12": "48"
    }  # fmt: skip


def test_the_table():
    lines = list(batch_table(BatchSettings(num_generations=2, world_size=1, per_device_train_batch_size=2)))
    assert lines == [
        "   G  ranks  prompts  completions  prompts per rank",
        "   2      1        1            2                 1",
        "   4      1  refused: `per_device_train_batch_size` 2 × `gradient_accumulation_steps` 1 = 2 completions per "
        "process and step are not whole groups of `num_generations` 4; nearest valid: `per_device_train_batch_size` 4 "
        "or `gradient_accumulation_steps` 2 or `num_generations` 2",
        "   2      2        2            4                 1",
    ]
