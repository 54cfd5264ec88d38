"""Find settings that have no effect because of other settings, and suggest a change.

A setting is reported only if it differs from its default, since a file may write defaults. `conflicts.py` handles the
settings of vLLM. Settings that depend on the data or on the model are refused when these are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rl_vlm.config.data_sources import Which, is_file, is_mixture
from rl_vlm.config.engines import engines_where
from rl_vlm.config.function_source import read_source

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig, DataSource, RunConfig

SYNCED = engines_where(lambda engine: engine.has_own_weights)
OF_POLICY = engines_where(lambda engine: not engine.has_own_weights)


def reads_no_split(data: DataConfig, which: Which) -> bool:
    """Return whether data is given but ignores the section's split: each entry is a file or has its own split."""
    given = data.entries(which)
    return bool(given) and all(
        is_file(entry.name) or (entry.split is not None and is_mixture(data, which)) for entry in given
    )


def reads_no_config(entry: DataSource) -> bool:
    """Return whether an entry ignores the section's `dataset_config`."""
    return entry.dataset_config is not None or is_file(entry.name) or ":" in entry.name


READ_BY_LOSSES = ("epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos")
"""Settings that some token losses read and others do not."""


def ignored_by_own_loss(run: RunConfig, name: str) -> bool:
    """Return whether the source of the user's loss never reads a setting. If there is no source, return False."""
    source = read_source(run.algorithm.loss_type) if run.algorithm.has_own_loss else None
    return source is not None and name not in source.attributes


@dataclass(frozen=True)
class Unread:
    """Settings of one section that a run ignores under a condition."""

    section: str
    names: str
    when: Callable[[RunConfig], bool]
    """Whether the run ignores these settings."""
    reason: str
    """Completes the sentence "they have no effect …"."""
    way_out: str
    """Alternative to leaving them out."""


UNREAD = (
    Unread(
        "model",
        "lora_r lora_alpha lora_target_modules lora_exclude_modules init_lora_weights use_rslora",
        lambda run: not run.model.use_peft,
        "without `use_peft`: no adapter is added",
        "set `use_peft: true`",
    ),
    Unread(
        "model",
        "bnb_4bit_quant_type use_bnb_nested_quant",
        lambda run: not run.model.load_in_4bit,
        "without `load_in_4bit`: weights are not quantized",
        "set `load_in_4bit: true`",
    ),
    Unread(
        "data",
        "dataset_train_split",
        lambda run: run.data.dataset_name is None,
        "without `dataset_name`, the data to train on",
        "name these data",
    ),
    Unread(
        "data",
        "dataset_train_split",
        lambda run: reads_no_split(run.data, "train"),
        "on a file, which is one split, or beside a `split` of each entry",
        "name the file of that split",
    ),
    Unread(
        "data",
        "dataset_test_split",
        lambda run: reads_no_split(run.data, "eval"),
        "on a file, which is one split, or beside a `split` of each entry",
        "name the file of that split",
    ),
    Unread(
        "data",
        "dataset_config",
        lambda run: all(map(reads_no_config, [*run.data.entries("train"), *run.data.entries("eval")])),
        "without data of the hub or a directory",
        "name such data",
    ),
    Unread(
        "data",
        "dataset_test_split",
        lambda run: run.data.eval_dataset_name is None,
        "without `eval_dataset_name`, the data to evaluate on",
        "name these data",
    ),
    Unread(
        "data",
        "dataloader_prefetch_factor",
        lambda run: run.data.dataloader_num_workers == 0,
        "without `dataloader_num_workers`: only workers prefetch",
        "set `dataloader_num_workers` above 0",
    ),
    Unread(
        "rollout",
        "weight_sync_steps agreement_steps lora_sync",
        lambda run: not run.rollout.facts.has_own_weights,
        f"on `engine` {' or '.join(OF_POLICY)}, which samples from the trained weights themselves",
        f"set `engine` to {' or '.join(SYNCED)}",
    ),
    Unread(
        "rollout",
        "ds3_gather_for_generation",
        lambda run: run.rollout.facts.has_own_weights,
        "on an engine with weights of its own",
        f"set `engine` to {' or '.join(OF_POLICY)}",
    ),
    Unread(
        "rollout",
        "num_generations_eval eval_temperature",
        lambda run: run.data.eval_dataset_name is None,
        "without `eval_dataset_name`, the data to evaluate on",
        "name these data",
    ),
    Unread(
        "algorithm",
        "sapo_temperature_neg sapo_temperature_pos",
        lambda run: not run.algorithm.has_own_loss and run.algorithm.loss_type != "sapo",
        "on a `loss_type` other than sapo",
        "set `loss_type: sapo`",
    ),
    Unread(
        "algorithm",
        "epsilon epsilon_high delta",
        lambda run: run.algorithm.loss_type == "sapo",
        "on `loss_type` sapo, which has no clip",
        "choose another loss",
    ),
    Unread(
        "algorithm",
        "epsilon delta",
        lambda run: run.algorithm.loss_type == "cispo",
        "on `loss_type` cispo, which bounds the ratio by `epsilon_high` alone",
        "choose another loss",
    ),
    Unread(
        "algorithm",
        "loss_weights",
        lambda run: not run.algorithm.has_own_loss,
        "on a built-in `loss_type`, which has its own",
        "name a function of your own in `loss_type`",
    ),
    *(
        Unread(
            "algorithm",
            name,
            partial(ignored_by_own_loss, name=name),
            "on a `loss_type` of your own whose source does not read it",
            f"read `algorithm.{name}` in the function",
        )
        for name in READ_BY_LOSSES
    ),
    Unread(
        "algorithm",
        "loss_normalizer",
        lambda run: run.algorithm.has_own_loss and run.algorithm.loss_weights != "token",
        "on `loss_weights` other than token",
        "set `loss_weights: token`",
    ),
    Unread(
        "algorithm",
        "loss_normalizer",
        lambda run: not run.algorithm.has_own_loss and run.algorithm.loss_type not in ("dapo", "cispo"),
        "on a `loss_type` other than dapo and cispo",
        "choose one of these",
    ),
    Unread(
        "algorithm",
        "use_bias_correction_kl",
        lambda run: run.algorithm.beta == 0,
        "without `beta`: there is no KL term",
        "set `beta` above 0",
    ),
    Unread(
        "algorithm",
        "ref_model_mixup_alpha ref_model_sync_steps",
        lambda run: not run.algorithm.sync_ref_model,
        "without `sync_ref_model`: the reference model does not move",
        "set `sync_ref_model: true`",
    ),
    Unread(
        "algorithm",
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
        lambda run: not run.algorithm.vllm_importance_sampling_correction,
        "without `vllm_importance_sampling_correction`",
        "set that to true",
    ),
    Unread(
        "train",
        "adam_beta1 adam_beta2 adam_epsilon",
        lambda run: run.train.optim == "adafactor",
        "on `optim` adafactor, which has no such moments",
        "set `optim` to adamw_torch or adamw_8bit",
    ),
    Unread(
        "train",
        "warmup_steps",
        lambda run: run.train.lr_scheduler_type == "constant",
        "on `lr_scheduler_type` constant",
        "use constant_with_warmup",
    ),
    Unread(
        "train",
        "metric_for_best_model greater_is_better",
        lambda run: not run.train.load_best_model_at_end,
        "without `load_best_model_at_end`: no checkpoint is selected",
        "set that to true",
    ),
    Unread(
        "memory",
        "gradient_checkpointing",
        lambda run: run.memory.gradient_checkpointing == "vision_tower" and run.model.freeze_vision_tower,
        "on a frozen vision tower, which keeps no activations",
        "use language_model",
    ),
    Unread(
        "evaluation",
        "endpoint_max_concurrency endpoint_timeout endpoint_max_retries",
        lambda run: run.evaluation.endpoint_url is None,
        "without `endpoint_url`",
        "give the address of the endpoint",
    ),
    Unread(
        "log",
        "logging_steps run_name",
        lambda run: not run.log.report_to,
        "without `report_to`: `metrics.jsonl` has every step",
        "name a tracker",
    ),
)


def unread_settings(config: RunConfig) -> Iterator[str]:
    """Yield a message for each row of `UNREAD` that applies and has settings that differ from their defaults."""
    for row in UNREAD:
        section = getattr(config, row.section)
        fields = type(section).model_fields
        names = [name for name in row.names.split() if getattr(section, name) != fields[name].default]
        if names and row.when(config):
            has, them = ("has", "it") if len(names) == 1 else ("have", "them")
            listed = ", ".join(f"`{name}`" for name in names)
            yield f"{listed} {has} no effect {row.reason}; leave {them} out, or {row.way_out}"
