"""TRL's defaults, for flat files.

A file is flat if it has keys and none of them is a section or `section.leaf`, as in TRL's YAML. Settings that a flat
file leaves out get the default of TRL 1.16 instead of the one in `schema.py`. Overrides do not change whether a file is
flat.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rl_vlm.config.engines import engine_named
from rl_vlm.config.schema import SECTIONS, SETTINGS

AS_IF_LEFT_OUT = {"dtype": "float32", "logging_steps": 10, "vllm_model_impl": "vllm"}
"""Fields to ignore if they have this value, TRL's default. Here they would mean something else: TRL's `dtype` is the
precision of the weights, and only trackers and vLLM read the other two."""

ALWAYS: dict[str, Any] = {
    "model.dtype": "bfloat16",  # TRL computes in bfloat16 unless `bf16: false` is set, whatever the weights' `dtype`
    "train.output_dir": "trainer_output",
    "train.num_train_epochs": 3.0,
    "train.eval_on_start": False,
    "memory.gradient_checkpointing": True,
    "log.log_completions": False,
}
"""Defaults of TRL that differ from the ones here, for settings that every run reads."""


def is_flat(keys: Iterable[str]) -> bool:
    """Return whether a file with these keys is flat."""
    parts = [key.partition(".")[0] for key in keys]
    return bool(parts) and not any(part in SECTIONS for part in parts)


def without_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a flat file without fields of `AS_IF_LEFT_OUT` that have TRL's default."""
    return {key: value for key, value in keys.items() if value is None or AS_IF_LEFT_OUT.get(key) != value}


def has_trackers(settings: Mapping[str, Any]) -> bool:
    """Return whether `settings`, by full name, report to a tracker."""
    return settings.get("log.report_to") not in (None, "none", [])


def trl_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's defaults for settings that `settings` (by full name) leave out and the run reads.

    Only defaults that differ from the ones here are returned. TRL evaluates as it trains: with `num_generations`
    completions per prompt, sampled at `temperature`.
    """

    def value_of(name: str) -> Any:
        given = settings.get(name)
        return SETTINGS[name].default if given is None else given

    defaults = dict(ALWAYS)
    if has_trackers(settings):
        defaults["log.logging_steps"] = 10
    engine = engine_named(value_of("rollout.engine"))
    if engine is not None and "vllm_model_impl" in engine.reads and not value_of("vllm.vllm_server_base_url"):
        defaults["vllm.vllm_model_impl"] = "vllm"
    if value_of("data.eval_dataset_name") is not None:
        defaults["rollout.num_generations_eval"] = value_of("rollout.num_generations")
        defaults["rollout.eval_temperature"] = value_of("rollout.temperature")
    if value_of("algorithm.loss_type") in ("dapo", "cispo"):
        defaults["algorithm.loss_normalizer"] = "window"
    return {name: default for name, default in defaults.items() if settings.get(name) is None}


def missing_defaults(settings: Mapping[str, Any], keys: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that is left out and whose default in TRL is not possible here.

    `settings` has full names, and `keys` has the keys of the file.
    """
    missing = []
    if settings.get("model.use_peft") and "lora_dropout" not in keys:
        missing.append("`lora_dropout` is 0.05 in TRL; here adapters have none")
    if settings.get("model.use_peft") and settings.get("model.lora_target_modules") is None:
        missing.append("`lora_target_modules` is PEFT's choice in TRL; here all linear layers of the language model")
    if settings.get("train.load_best_model_at_end") and settings.get("train.metric_for_best_model") is None:
        missing.append("`metric_for_best_model` is the held-out loss in TRL; here the reward")
    if settings.get("log.log_completions") and settings.get("log.num_completions_to_print") is None:
        missing.append("`log_completions` prints all completions in TRL; here `num_completions_to_print` of them")
    has_tools = settings.get("rollout.tools") or settings.get("rollout.environment") is not None
    if has_tools and settings.get("rollout.max_turns") is None:
        missing.append("`max_tool_calling_iterations` has no limit in TRL; here `max_turns` has one")
    return missing
