"""The model card of an export: `README.md`, with the YAML front matter that the hub reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_vlm.config import yaml_text
from rl_vlm.config.data_names import split_name
from rl_vlm.config.function_names import names_function
from rl_vlm.config.secrets import without_secrets
from rl_vlm.model.families import FAMILIES
from rl_vlm.model.files import ADAPTER_CONFIG, read_json
from rl_vlm.rollout.vllm.arguments import allowed_lora_rank
from rl_vlm.rollout.weights import why_not_in_vllm
from rl_vlm.tools.export.source import Source
from rl_vlm.tools.report.verdict import Fact, verdict_of

ExportForm = Literal["model", "adapter", "merged"]
"""All weights of the model, only the adapter, or the base model with the adapter merged into it."""

TEMPLATE = "card.md.jinja"
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\",;|\]})]+/)*([^\s/'\",;|\]})]+)/?")
SETTINGS = """
    model.freeze_vision_tower model.trainable_modules model.lora_r model.lora_alpha model.use_rslora model.load_in_4bit
    algorithm.loss_type algorithm.loss_weights algorithm.beta algorithm.epsilon algorithm.num_iterations
    train.learning_rate train.lr_scheduler_type train.warmup_steps train.prompts_per_step train.seed
    rollout.num_generations rollout.temperature rollout.max_completion_length
    data.prompt_template data.system_prompt data.chat_template_kwargs data.min_pixels data.max_pixels
""".split()
"""Settings that the card shows if they are set. Settings of an adapter are shown for adapters only."""
PACKAGES = ("rl-vlm", "transformers", "torch", "peft", "vllm", "accelerate", "datasets", "bitsandbytes")


@dataclass(frozen=True)
class Export:
    """A checkpoint and the form of its export."""

    source: Source
    form: ExportForm
    dtype: str
    """Type of a model's weights. An adapter's weights are float32."""
    name: str
    """Name of the export's directory."""


def model_card(export: Export) -> str:
    """Return the card, without folders of this machine and without secrets."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, finalize=public,
    )  # fmt: skip
    source, run, is_adapter = export.source, export.source.run, export.form == "adapter"
    start = run.starts[-1] if run and run.starts else {}
    verdict = verdict_of(run) if run else None
    versions = start.get("packages", {})
    return environment.get_template(TEMPLATE).render(
        front_matter=yaml_text.dump(front_matter(export)),
        export=export,
        base=source.base if source.is_on_hub(source.base) else Path(source.base).name,
        base_is_here=not source.is_on_hub(source.base),
        made_by=made if names_function(made := source.setting("model.model_name_or_path")) else None,
        state=state_of(source),
        rows=[Fact(label, cell(value)) for label, value in training_rows(source)],
        verdict=verdict,
        held_out=held_out_method(source),
        not_in_vllm=why_not_served(source) if is_adapter else None,
        lora_rank=allowed_lora_rank(read_json(source.checkpoint / ADAPTER_CONFIG)["r"]) if is_adapter else None,
        start=start,
        versions=", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions),
    )


def public(value: Any) -> Any:
    """Remove folders of this machine and secrets from a value for the template, if it is text."""
    return for_everyone(value) if isinstance(value, str) else value


def front_matter(export: Export) -> dict[str, Any]:
    """Return the metadata for the hub. Models and data are named only if they can be on the hub."""
    source, is_adapter = export.source, export.form == "adapter"
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    metadata["pipeline_tag"] = "image-text-to-text"
    if source.is_on_hub(source.base):
        metadata |= {"base_model": source.base, "base_model_relation": "adapter" if is_adapter else "finetune"}
    names = dict.fromkeys(split_name(name)[0] for name in data_names(source, "dataset_name"))
    if datasets := [name for name in names if source.is_on_hub(name)]:
        metadata["datasets"] = datasets
    metadata["tags"] = ["grpo", "rl-vlm", *(["lora"] if source.is_adapter else [])]
    return metadata


def data_names(source: Source, setting: str) -> list[str]:
    """Return the names of the entries of `dataset_name` or `eval_dataset_name`."""
    given = source.setting(f"data.{setting}") or []
    entries = [given] if isinstance(given, str) else given
    return [entry if isinstance(entry, str) else entry["name"] for entry in entries]


def state_of(source: Source) -> str:
    """Say which step of the run the weights come from, and whether the run was complete."""
    summary = source.run.summary if source.run else {}
    after = f"These are the weights after optimizer step {source.step} of {source.max_steps}"
    if source.step == source.max_steps:
        return f"The run was complete: {after[0].lower()}{after[1:]}."
    if not summary:
        return f"**The run was not complete when this was exported.** {after}."
    if source.setting("train.load_best_model_at_end") and Path(summary["checkpoint"]).name == source.checkpoint.name:
        return f"{after}, the best of the run by `{source.setting('train.metric_for_best_model')}`."
    if summary.get("optimizer_steps") == source.step:
        return f"The run was ended early: {after[0].lower()}{after[1:]}."
    return f"**These are not the weights that the run ended with.** {after}."


def training_rows(source: Source) -> list[tuple[str, Any]]:
    """Return the rows of the card's table: data, reward functions, dtype, and the settings of `SETTINGS`."""
    rows: list[tuple[str, Any]] = [
        ("training data", ", ".join(data_names(source, "dataset_name"))),
        ("held-out data", ", ".join(data_names(source, "eval_dataset_name")) or "none"),
        ("reward functions", ", ".join(reward_names(source))),
        ("`model.dtype`", source.model.precision),
    ]
    for name in SETTINGS:
        of_adapter = name.startswith("model.lora_") or name in ("model.use_rslora", "model.load_in_4bit")
        value = source.setting(name)
        is_set = value is not None and value is not False and value != {}
        if is_set and (source.is_adapter or not of_adapter):
            rows.append((f"`{name}`", value))
    return rows


def reward_names(source: Source) -> list[str]:
    """Return the reward functions with their weights."""
    specs = [{"function": s} if isinstance(s, str) else s for s in source.setting("rewards.reward_funcs") or []]
    weights = source.setting("rewards.reward_weights") or [spec.get("weight", 1.0) for spec in specs]
    return [f"{spec['function']} (weight {weight:g})" for spec, weight in zip(specs, weights, strict=True)]


def held_out_method(source: Source) -> str | None:
    """Return a sentence on the rows and steps of held-out figures, or None if there are no figures."""
    lines = source.run.lines if source.run else []
    evaluated = [line for line in lines if "eval_num_samples" in line]
    if not evaluated:
        return None
    steps = dict.fromkeys([evaluated[0]["step"], evaluated[-1]["step"]])
    when = " and ".join(f"after step {step}" if step else "before training" for step in steps)
    return f"Held-out figures are over {evaluated[-1]['eval_num_samples']:.0f} rows, {when}."


def why_not_served(source: Source) -> str | None:
    """Return the reason why vLLM cannot load the adapter, or None if it can."""
    vision = tuple(prefix for family in FAMILIES.values() for prefix in family.vision_prefixes)
    return why_not_in_vllm(source.checkpoint, vision)


def cell(value: Any) -> str:
    """Return a value as text for one cell of a table."""
    text = value if isinstance(value, str) else yaml_text.one_line(value)
    return " ".join(text.split()).replace("|", "\\|")


def for_everyone(text: str) -> str:
    """Return text without secrets, with absolute paths cut to their last part."""
    return ABSOLUTE_PATH.sub(r"\1", without_secrets(text))
