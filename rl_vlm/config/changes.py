"""Find settings that changed between a checkpoint and the resumed run. A change is applied from now on, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vlm.config.function_source import read_source
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.secrets import starred

UNCHANGEABLE = {
    "the checkpoint's weights were trained with the old value": (
        "model.use_peft", "model.lora_r", "model.lora_alpha", "model.lora_target_modules", "model.lora_exclude_modules",
        "model.init_lora_weights", "model.use_rslora", "model.freeze_vision_tower",
        "model.trainable_modules", "algorithm.sync_ref_model",
        "model.load_in_4bit", "model.bnb_4bit_quant_type", "model.use_bnb_nested_quant",
    ),
    "the checkpoint's optimizer state is that of the old value": ("train.optim",),
    "rows are drawn in an order that follows from it": ("train.seed", "data.shuffle_dataset"),
    "the best step so far was chosen by the old value": ("train.metric_for_best_model", "train.greater_is_better"),
}  # fmt: skip
"""Settings that must not change during a run, by the reason."""

OF_BATCHES = (
    "train.prompts_per_step", "train.per_device_train_batch_size", "train.gradient_accumulation_steps",
    "train.steps_per_generation",
)  # fmt: skip
"""Settings that determine the batch, together with the number of processes."""

OF_WINDOWS = (
    "data.prompt_template", "data.system_prompt", "data.image_root", "data.video_root", "data.chat_template_kwargs",
    "data.min_pixels", "data.max_pixels", "data.fps", "data.num_frames", "data.min_frames", "data.max_frames",
    "data.video_min_pixels", "data.video_max_pixels", "data.video_total_pixels", "data.video_format", "rollout.engine",
    "rollout.num_generations", "rollout.temperature", "rollout.max_completion_length", "rollout.tools",
    "rollout.environment", "rollout.environment_protocol", "rollout.environment_kwargs", "rollout.max_turns",
    "rollout.observation_role", "rollout.tool_format", "rollout.keep_images", "rollout.edit_every",
    "rewards.reward_funcs", "rewards.reward_weights", "algorithm.beta", *OF_BATCHES,
)  # fmt: skip
"""Settings that must not change while a window is in training, since its completions were generated with them."""

OF_BEST = (
    "data.eval_dataset_name", "data.dataset_test_split", "rollout.num_generations_eval", "rollout.eval_temperature",
    "rollout.tools", "rollout.environment", "rollout.environment_protocol", "rollout.environment_kwargs",
    "rollout.max_turns", "rollout.keep_images", "rollout.edit_every", "rewards.reward_funcs", "rewards.reward_weights",
)  # fmt: skip
"""Settings that must not change between evaluations if these are compared to find the best step."""

OF_ONE_START = ("train.resume_from_checkpoint", "train.overwrite_output_dir")
"""Settings for one start of a run. A difference in them means nothing."""


def flat_settings(config: RunConfig) -> dict[str, Any]:
    """Return every setting by its full name, with JSON types. Secrets are starred out."""
    sections = starred(config.model_dump(mode="json"))
    return {f"{section}.{leaf}": value for section, leaves in sections.items() for leaf, value in leaves.items()}


def changed_settings(saved: Mapping[str, Any], config: RunConfig) -> dict[str, str]:
    """Return `old -> new` for each setting that differs from the saved ones, by full name.

    A setting that is not among the saved ones counts as unchanged, and so does a changed secret.
    """
    present = {name: value for name, value in flat_settings(config).items() if name not in OF_ONE_START}
    before = starred({name: saved[name] for name in present if name in saved})  # an earlier version starred nothing
    return {name: f"{before[name]!r} -> {present[name]!r}" for name in before if before[name] != present[name]}


def function_sources(config: RunConfig) -> dict[str, str]:
    """Return the digest of the source of the user's loss, by setting. Return nothing if the source cannot be read.

    A function of a Python session has a digest in its name instead.
    """
    algorithm = config.algorithm
    source = read_source(algorithm.loss_type) if algorithm.has_own_loss else None
    return {"algorithm.loss_type": source.digest} if source else {}


def changed_sources(saved: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """Return `old -> new`, by full name, for each setting whose function has changed its source since it was saved."""
    present, names = function_sources(config), flat_settings(config)
    return {
        setting: f"{names[setting]!r} with the source {saved[setting]} -> the source {digest}"
        for setting, digest in present.items()
        if saved.get(setting, digest) != digest
    }


def refused_changes(changes: Mapping[str, str], within_window: bool, keeps_best: bool) -> list[str]:
    """Return a line for each change that cannot be applied.

    `within_window`: the checkpoint holds completions. `keeps_best`: `load_best_model_at_end` is set.
    """
    reasons = {name: reason for reason, names in UNCHANGEABLE.items() for name in names}
    if within_window:
        reasons |= dict.fromkeys(OF_WINDOWS, "the checkpoint holds completions that were generated with the old value")
    if keeps_best:
        reasons |= dict.fromkeys(OF_BEST, "the best step so far was evaluated with the old value")
    return [f"`{name}` {change}: {reasons[name]}" for name, change in changes.items() if name in reasons]
