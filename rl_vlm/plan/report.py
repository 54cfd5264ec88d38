"""The memory plan as text, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rl_vlm.config.batches import batch_settings, plan_batches
from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.batch import batch_table, global_batch
from rl_vlm.plan.build import Hardware, Model, single_completion, vllm_needs
from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.host import host_phases
from rl_vlm.plan.memory import MemoryPlan, Phase
from rl_vlm.plan.suggest import Setup

LOGITS_COPIES = 2
"""Float32 logits and their gradient."""


def describe_plan(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> str:
    """Return the plan for people: the set-up, the table, the phase that peaks, and what fits."""
    weights = plan.weights
    nodes = f"{hardware.nodes} nodes of " if hardware.nodes > 1 else ""
    lines = [
        f"{config.model.model_name_or_path}: {weights.num / 1e9:.2f}B weights, "
        f"{weights.num_trained / 1e9:.2f}B trained",
        f"{nodes}{hardware.gpus} x {plan.card.name} ({plan.card.memory / GIB:.1f} GiB), {plan.engine.name}; "
        f"prompts of {model.prompt_tokens:,} tokens with an image of {model.patches:,} patches, completions of "
        f"{config.rollout.max_completion_length:,}",
        "",
        phase_table("GiB per GPU", plan.phases),
        "",
        f"Peak: {plan.peak.name}, {gib(plan.peak.total)} of {gib(plan.available)} GiB beside CUDA's own memory and a "
        f"reserve: {'it fits' if plan.fits else 'it does not fit'}.",
        *limits(config, hardware, model, plan),
        "",
        phase_table("GiB of host memory per node", host_phases(config, plan, hardware.gpus)),
        "",
        *batch_lines(config, hardware),
    ]
    return "\n".join(lines)


def limits(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> Iterator[str]:
    """Yield the largest sizes that fit."""
    least, largest = single_completion(config, model), plan.largest_tokens
    length = config.rollout.max_completion_length
    yield f"memory.micro_batch_tokens: {config.memory.micro_batch_tokens:,}; the largest that fits: {largest:,}."
    if largest < least:
        yield f"A prompt with one completion has {least:,} tokens, more than fit at once."
    else:
        price = least - model.prompt_tokens - length
        together = (min(largest, config.memory.micro_batch_tokens) - model.prompt_tokens - price) // length
        yield f"Completions of {length:,} tokens in one micro-batch with their prompt: {max(1, together):,}."
    if config.rollout.engine == "vllm":
        yield from vllm_limits(config, hardware, model, plan)
    rows = config.train.per_device_train_batch_size
    if rows is not None:
        yield (
            f"For comparison, {rows} padded rows of prompt and completion at once, each with its image and with all of "
            f"its logits: {gib(padded_rows(config, model, plan, rows))} GiB."
        )


def vllm_limits(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> Iterator[str]:
    """Yield the sequences that vLLM's cache holds, and the range of its fraction of the card."""
    needed, utilization = vllm_needs(config, model), config.vllm.vllm_gpu_memory_utilization
    least = needed.utilization(plan.card, 1)
    enough = needed.utilization(plan.card, config.rollout.max_num_seqs)
    others = plan.peak.total - plan.rollouts.while_training
    if config.vllm.vllm_enable_sleep_mode:
        others = sum(plan.held.values())
    most = (plan.available - others) / plan.card.memory
    yield (
        f"vllm.vllm_gpu_memory_utilization: {utilization}, which holds "
        f"{needed.num_sequences(plan.card, utilization):,} sequences of full length; for max_num_seqs "
        f"({config.rollout.max_num_seqs:,}) {enough:.2f}; the least is {least:.2f}, the most that fits "
        f"{max(0.0, most):.2f}."
    )


def padded_rows(config: RunConfig, model: Model, plan: MemoryPlan, rows: int) -> int:
    """Return the peak of a trainer of one padded row per completion that computes all logits of its rows at once."""
    length, found = config.rollout.max_completion_length, plan.activations
    logits = LOGITS_COPIES * 4 * rows * length * model.config.get_text_config().vocab_size
    activations = rows * ((model.prompt_tokens + length) * found.per_token + model.patches * found.per_patch)
    held = sum(plan.held.values()) + plan.engine.gradients(plan.weights, plan.num_ranks) + plan.rollouts.while_training
    return round(held + plan.engine.gathered(plan.weights, plan.num_ranks) + activations + logits)


def batch_lines(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    """Yield the global batch, and what a change of G or of the number of GPUs does to it."""
    yield global_batch(plan_batches(config, hardware.num_ranks), hardware.nodes)
    yield from batch_table(batch_settings(config, hardware.num_ranks))


def phase_table(title: str, phases: Sequence[Phase]) -> str:
    """Return a table of GiB: one row per part, one column per phase."""
    names = list(dict.fromkeys(name for phase in phases for name, size in phase.parts.items() if size))
    rows = [[name, *(gib(phase.parts.get(name, 0)) for phase in phases)] for name in names]
    rows.append(["sum", *(gib(phase.total) for phase in phases)])
    return aligned([title, *(phase.name for phase in phases)], rows)


def setup_table(setups: Sequence[Setup]) -> str:
    """Return set-ups with their peak, the largest micro-batch, and their time relative to the first."""
    rows = [
        [
            each.name,
            f"{each.hardware.nodes} x {each.hardware.gpus}",
            gib(each.plan.peak.total),
            each.plan.peak.name,
            f"{each.plan.largest_tokens:,}" if each.plan.fits else "does not fit",
            f"{each.seconds / setups[0].seconds:.2f}",
        ]
        for each in setups
    ]
    return aligned(["set-up", "GPUs", "peak, GiB", "phase", "largest micro-batch", "relative time"], rows)


def setup_data(setup: Setup) -> dict[str, Any]:
    """Return a set-up for `--json`."""
    return {
        "engine": setup.hardware.engine.name,
        "settings": setup.changes,
        "gpus": setup.hardware.gpus,
        "nodes": setup.hardware.nodes,
        "peak_bytes": setup.plan.peak.total,
        "fits": setup.plan.fits,
        "largest_micro_batch_tokens": setup.plan.largest_tokens,
        "estimated_seconds": setup.seconds,
    }


def gib(size: int) -> str:
    """Return bytes in GiB with one digit, or nothing for 0."""
    if size == 0:
        return ""
    return f"{size / GIB:,.1f}" if size >= GIB / 20 else "<0.1"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with columns of equal width: names to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *figures]).rstrip()

    return "\n".join(line(row) for row in [head, *rows])


def plan_data(config: RunConfig, hardware: Hardware, plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan with the documented keys of `--json`; sizes are in bytes."""
    return {
        "card": plan.card.name,
        "card_bytes": plan.card.memory,
        "available_bytes": plan.available,
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "engine": plan.engine.name,
        "phases": {phase.name: phase.parts for phase in plan.phases},
        "host_phases": {phase.name: phase.parts for phase in host_phases(config, plan, hardware.gpus)},
        "peak_phase": plan.peak.name,
        "peak_bytes": plan.peak.total,
        "fits": plan.fits,
        "largest_micro_batch_tokens": plan.largest_tokens,
        "patch_price": plan.activations.patch_price,
        "activations": {name: round(value) for name, value in vars(plan.activations).items()},
    }
