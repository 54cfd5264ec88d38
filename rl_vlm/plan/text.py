"""The memory plan as text, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rl_vlm.config import yaml_text
from rl_vlm.config.batches import batch_settings, batch_sizes
from rl_vlm.config.engines import engines_where
from rl_vlm.config.schema import RunConfig
from rl_vlm.log.outcome import aligned
from rl_vlm.plan.batch import batch_table, global_batch
from rl_vlm.plan.build import (
    Model,
    completions_together,
    images_together,
    single_completion,
    vllm_fractions,
    vllm_needs,
)
from rl_vlm.plan.hardware import CUDA_CONTEXT, GIB, NCCL_BUFFERS, Hardware
from rl_vlm.plan.host import host_phases
from rl_vlm.plan.memory import MemoryPlan, Phase, part_names
from rl_vlm.plan.observed import observed_images
from rl_vlm.plan.suggest import MAX_NODES, Setup

LOGITS_COPIES = 2
"""Float32 logits and their gradient."""

EFFECTS: dict[str, dict[Any, str]] = {
    "model.load_in_4bit": {True: "QLoRA: the frozen language model is held in 4 bits"},
    "model.use_peft": {True: "LoRA: only an adapter has gradients and optimizer state"},
    "model.freeze_vision_tower": {True: "the vision tower has no gradients, optimizer state and activations"},
    "rollout.engine": dict.fromkeys(
        engines_where(lambda each: each.samples_from_policy),
        "the model that is trained also samples; the time of sampling is not counted",
    ),
    "memory.gradient_checkpointing": {True: "layers keep their inputs only, and are computed again"},
    "memory.activation_offloading": {True: "the inputs of layers are in host memory"},
    "train.optim": {
        "adamw_8bit": "the optimizer state is held in 8 bits",
        "adafactor": "the optimizer state of a matrix is its rows and columns",
    },
    "vllm.vllm_enable_sleep_mode": {True: "vLLM frees its memory during training"},
}
"""Effects of changed settings on memory, by setting and new value."""


def describe_plan(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> str:
    """Return the plan as text: the set-up, the table, the peak phase, and the sizes that fit."""
    weights = plan.weights
    nodes = f"{hardware.nodes} nodes of " if hardware.nodes > 1 else ""
    lines = [
        f"{config.model.model_name_or_path}: {weights.num / 1e9:.2f}B weights, "
        f"{weights.num_trained / 1e9:.2f}B trained",
        f"{nodes}{hardware.gpus} x {plan.card.name} ({plan.card.memory / GIB:.1f} GiB), {plan.sharding.name}; "
        f"prompts of {model.prompt_tokens:,} tokens with {media(model)}, completions of "
        f"{config.rollout.max_completion_length:,}{observed(config, model)}",
        "",
        phase_table("GiB per GPU", plan.phases, not_planned(plan)),
        "",
        f"Peak: {plan.peak.name}, {gib(plan.peak.total)} of {gib(plan.available)} GiB that the run can use: "
        f"{'it fits' if plan.fits else 'it does not fit'}.",
        *limits(config, hardware, model, plan),
        "",
        phase_table("GiB of host memory per node", host_phases(config, plan, hardware.gpus)),
        "",
        *batch_lines(config, hardware),
    ]
    return "\n".join(lines)


def media(model: Model) -> str:
    """Describe the image or video of a prompt."""
    if model.num_frames:
        return f"a video of {model.num_frames} frames ({model.patches:,} patches)"
    return f"an image of {model.patches:,} patches"


def observed(config: RunConfig, model: Model) -> str:
    """Describe the observations that the plan assumes. Return an empty text without tools."""
    if not config.rollout.has_tools:
        return ""
    number = observed_images(config.rollout, model.image_tokens)
    contexts = config.rollout.max_contexts
    edited = f" in each of up to {contexts:,} contexts," if contexts > 1 else ""
    shown = "a video" if model.num_frames else "an image"
    return f"{edited} with observations, of which up to {number:,} are assumed to have {shown} as large as the prompt's"


def limits(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> Iterator[str]:
    """Yield the largest sizes that fit."""
    least, largest = single_completion(config, model), plan.largest_tokens
    length = config.rollout.max_completion_length
    yield f"memory.micro_batch_tokens: {plan.micro_batch_tokens:,}; the largest that fits: {largest:,}."
    if largest < least:
        yield f"A prompt with one completion has {least:,} tokens, more than fit at once."
    else:
        together = completions_together(config, model, plan)
        yield f"Completions of {length:,} tokens in one micro-batch with their prompt: {together:,}."
    if config.rollout.facts.reserves_memory:
        yield from vllm_limits(config, model, plan)
    rows = config.train.per_device_train_batch_size
    if rows is not None:
        yield (
            f"For comparison, {rows} padded rows of prompt and completion at once, each with its image and with all of "
            f"its logits: {gib(padded_rows(config, model, plan, rows))} GiB."
        )


def vllm_limits(config: RunConfig, model: Model, plan: MemoryPlan) -> Iterator[str]:
    """Yield the number of sequences in vLLM's cache, and the range of vLLM's fraction of the card."""
    needed, utilization = vllm_needs(config, model, plan.card), config.vllm.vllm_gpu_memory_utilization
    least, enough, most = vllm_fractions(config, model, plan).values()
    yield (
        f"vllm.vllm_gpu_memory_utilization: {utilization}, which holds "
        f"{needed.num_sequences(plan.card, utilization):,} sequences of full length; for max_num_seqs "
        f"({config.rollout.max_num_seqs:,}) {enough:.2f}; the least is {least:.2f}, the most that fits "
        f"{max(0.0, most):.2f}."
    )


def padded_rows(config: RunConfig, model: Model, plan: MemoryPlan, rows: int) -> int:
    """Return the peak of a trainer that pads each completion to a row and computes all logits of its rows at once."""
    length, found = config.rollout.max_completion_length, plan.activations
    logits = LOGITS_COPIES * 4 * rows * length * model.config.get_text_config().vocab_size
    patches = images_together(config, model) * model.patches
    activations = rows * ((model.prompt_tokens + length) * found.per_token + patches * found.per_patch)
    return round(plan.beside_micro_batch + activations + logits)


def batch_lines(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    """Yield the global batch, and a table of batches with other G and other numbers of GPUs."""
    yield global_batch(batch_sizes(config, hardware.num_ranks), hardware.nodes)
    yield from batch_table(batch_settings(config, hardware.num_ranks))


def not_planned(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of a card that the plan may not use. They are the same in all phases."""
    fixed = {"CUDA context": CUDA_CONTEXT, "NCCL buffers": NCCL_BUFFERS if plan.num_ranks > 1 else 0}
    return fixed | {"reserve": plan.card.memory - plan.available - sum(fixed.values())}


def phase_table(title: str, phases: Sequence[Phase], beside: Mapping[str, int] = {}) -> str:
    """Return a table of GiB: one row per part, one column per phase. Rows below the sum are the same in all phases."""
    rows = [[title, *(phase.name for phase in phases)]]
    rows += [[name, *(gib(phase.parts.get(name, 0)) for phase in phases)] for name in part_names(phases)]
    rows.append(["sum", *(gib(phase.total) for phase in phases)])
    rows += [[name, *[gib(size)] * len(phases)] for name, size in beside.items() if size]
    return aligned(rows, figures=True)


def smallest_table(setups: Sequence[Setup]) -> str:
    """Return a table of the smallest set-ups that fit, or a line that none fits."""
    if not setups:
        return f"No set-up on up to {MAX_NODES} nodes fits, with LoRA and QLoRA neither."
    return f"The smallest set-ups that fit:\n{setup_table(setups)}"


def suggested_tables(setups: Sequence[Setup], own: MemoryPlan) -> str:
    """Return tables of the set-ups that fit, with the reasons, and of the others. `own` is the plan of the unchanged
    run."""
    fit, others = [each for each in setups if each.plan.fits], [each for each in setups if not each.plan.fits]
    texts = []
    if fit:
        texts.append(
            f"{len(fit)} of {len(setups)} set-ups fit into {gib(own.available)} GiB per GPU; the run as it is needs "
            f"{gib(own.peak.total)}. Set-ups with the most completions of a group in one micro-batch come first, and "
            f"of these the fastest:\n{setup_table(fit, setups[0])}"
        )
    why = dict(reason for each in fit for reason in reasons(each))
    if why:
        texts.append(f"Why they fit:\n{aligned([('change', 'effect'), *why.items()])}")
    if others:
        texts.append(f"Set-ups that do not fit, the smallest peak first:\n{setup_table(others, setups[0])}")
    return "\n\n".join(texts)


def reasons(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield the changes of a set-up that save memory, with their effect."""
    sharding = setup.hardware.sharding
    effects = []
    if sharding.shards_state and setup.hardware.num_ranks > 1:
        shared = {"weights": sharding.shards_weights, "gradients": sharding.shards_gradients, "optimizer state": True}
        effects.append(f"each GPU holds a part of {', '.join(part for part, is_shared in shared.items() if is_shared)}")
    if sharding.offloads:
        held = {"weights": sharding.offloads_weights, "gradients, optimizer state": sharding.offloads_state}
        effects.append(f"in host memory: {', '.join(part for part, is_held in held.items() if is_held)}")
    if effects:
        yield sharding.name, "; ".join(effects)
    for key, value in setup.changes.items():
        if effect := EFFECTS.get(key, {}).get(value):
            yield f"{key}={yaml_text.one_line(value)}", effect


def setup_table(setups: Sequence[Setup], reference: Setup | None = None) -> str:
    """Return set-ups with their peak, the largest micro-batch, completions at once, and time relative to `reference`.

    By default this is the first.
    """
    seconds = (reference or setups[0]).seconds
    rows = [
        [
            each.name,
            f"{each.hardware.nodes} x {each.hardware.gpus}",
            gib(each.plan.peak.total),
            each.plan.peak.name,
            f"{each.plan.largest_tokens:,}" if each.plan.fits else "does not fit",
            f"{each.together}",
            f"{each.seconds / seconds:.2f}",
        ]
        for each in setups
    ]
    head = ["set-up", "GPUs", "peak, GiB", "phase", "largest micro-batch", "completions", "relative time"]
    return aligned([head, *rows], figures=True)


def setup_data(setup: Setup) -> dict[str, Any]:
    """Return a set-up for `--json`."""
    return {
        "sharding": setup.hardware.sharding.name,
        "settings": setup.changes,
        "gpus": setup.hardware.gpus,
        "nodes": setup.hardware.nodes,
        "peak_bytes": setup.plan.peak.total,
        "fits": setup.plan.fits,
        "largest_micro_batch_tokens": setup.plan.largest_tokens,
        "completions_per_micro_batch": setup.together,
        "estimated_seconds": setup.seconds,
    }


def gib(size: int) -> str:
    """Format bytes as GiB with one decimal. Returns an empty text for 0."""
    if size == 0:
        return ""
    return f"{size / GIB:,.1f}" if size >= GIB / 20 else "<0.1"


def plan_data(config: RunConfig, hardware: Hardware, model: Model, plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan with the documented keys of `--json`; sizes are in bytes."""
    batches = batch_sizes(config, hardware.num_ranks)
    shares_cards = config.rollout.facts.reserves_memory
    return {
        "card": plan.card.name,
        "card_bytes": plan.card.memory,
        "available_bytes": plan.available,
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "sharding": plan.sharding.name,
        "phases": {phase.name: phase.parts for phase in plan.phases},
        "host_phases": {phase.name: phase.parts for phase in host_phases(config, plan, hardware.gpus)},
        "peak_phase": plan.peak.name,
        "peak_bytes": plan.peak.total,
        "fits": plan.fits,
        "not_planned": not_planned(plan),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "largest_micro_batch_tokens": plan.largest_tokens,
        "completions_per_micro_batch": completions_together(config, model, plan),
        "observed_images": observed_images(config.rollout, model.image_tokens),
        "vllm_gpu_memory_utilization": vllm_fractions(config, model, plan) if shares_cards else None,
        "global_batch": asdict(batches) | {"completions_per_step": batches.completions_per_step},
        "patch_price": plan.activations.patch_price,
        "activations": {name: round(value) for name, value in vars(plan.activations).items()},
    }
