"""The memory plan as text, and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.build import Hardware, Model
from rl_vlm.plan.memory import MemoryPlan

GIB = 2**30


def describe_plan(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> str:
    """Return the plan for people: the set-up, the table, the phase that peaks, and what fits."""
    weights = plan.weights
    lines = [
        f"{config.model.model_name_or_path}: {weights.num / 1e9:.2f}B weights, "
        f"{weights.num_trained / 1e9:.2f}B of them trained",
        f"{hardware.nodes} x {hardware.gpus} GPUs {plan.card.name} ({plan.card.memory / GIB:.1f} GiB each), "
        f"{plan.engine.name}, prompts of {model.prompt_tokens:,} tokens, completions of "
        f"{config.rollout.max_completion_length:,}",
        "",
        plan_table(plan),
        "",
        f"Peak: {plan.peak.name}, {gib(plan.peak.total)} of {gib(plan.available)} GiB that the card offers beside "
        f"CUDA's own memory and a reserve: {'it fits' if plan.fits else 'it does not fit'}.",
        f"memory.micro_batch_tokens: {config.memory.micro_batch_tokens:,} is set; up to {plan.largest_tokens:,} fit.",
    ]
    return "\n".join(lines)


def plan_table(plan: MemoryPlan) -> str:
    """Return a table of GiB: one row per part, one column per phase."""
    names = list(dict.fromkeys(name for phase in plan.phases for name, size in phase.parts.items() if size))
    rows = [[name, *(gib(phase.parts.get(name, 0)) for phase in plan.phases)] for name in names]
    rows.append(["sum", *(gib(phase.total) for phase in plan.phases)])
    return aligned(["GiB per GPU", *(phase.name for phase in plan.phases)], rows)


def gib(size: int) -> str:
    """Return bytes in GiB with one digit, or nothing for 0."""
    if size == 0:
        return ""
    return f"{size / GIB:.1f}" if size >= GIB / 20 else "<0.1"


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines with columns of equal width: names to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *figures]).rstrip()

    return "\n".join(line(row) for row in [head, *rows])


def plan_data(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan with the documented keys of `--json`, in bytes."""
    return {
        "card": plan.card.name,
        "card_bytes": plan.card.memory,
        "available_bytes": plan.available,
        "ranks": plan.num_ranks,
        "engine": plan.engine.name,
        "phases": {phase.name: phase.parts for phase in plan.phases},
        "peak_phase": plan.peak.name,
        "peak_bytes": plan.peak.total,
        "fits": plan.fits,
        "largest_micro_batch_tokens": plan.largest_tokens,
        "patch_price": plan.activations.patch_price,
        "activations": vars(plan.activations),
    }
