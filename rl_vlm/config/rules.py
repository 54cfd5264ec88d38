"""Rules about several settings: combinations that are refused, and settings without effect.

Each rule is one row: settings, a condition on the run's settings, and a message with a solution. `broken` checks them.
Rules that depend on the data or on the model are checked when these are opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from rl_vlm.config import schedules
from rl_vlm.config.addresses import wrong_addresses
from rl_vlm.config.data_names import Which
from rl_vlm.config.data_sources import (
    NAMES,
    OWN_SETTINGS,
    SPLITS,
    all_entries,
    all_entries_have,
    has_draws,
    has_other_split,
    ignored_columns,
    reads_no_config,
    reads_no_split,
    repeated_columns,
    repeated_entry,
    with_two_splits,
)
from rl_vlm.config.engines import ENGINES, READ_BY_STARTED_SERVERS, VLLM_SETTINGS, Engine, engines_where
from rl_vlm.config.function_names import is_live_name, label_of_live
from rl_vlm.config.function_source import read_source
from rl_vlm.config.parts import CHANGING_THE_BASE, named_parts
from rl_vlm.config.sections import Sections
from rl_vlm.stages import TAKEN_NAME, is_taken


class Rule(NamedTuple):
    """A rule about some settings."""

    names: str
    """The settings, separated by spaces. If all of them have their defaults, the rule is not broken, since a file may
    write defaults. If there are none, the rule is about missing settings."""
    when: Callable[[Sections], bool | list[dict[str, Any]]]
    """Whether the rule is broken, or the values that each of its messages names."""
    message: str
    """Template of the message. `{section.leaf}` is a setting, `{names}` lists the settings that are not at their
    defaults, and `{has}` and `{them}` agree with their number."""


def broken(config: Sections, rules: Iterable[Rule]) -> Iterator[str]:
    """Yield the messages of the rules that the settings break."""
    sections = dict(config)
    changed = [
        name
        for section in sections.values()
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != field.default
    ]
    for rule in rules:
        about = rule.names.split()
        names = [name for name in changed if name in about]
        found = rule.when(config) if names or not about else False
        has, them = ("has", "it") if len(names) == 1 else ("have", "them")
        listed = ", ".join(f"`{name}`" for name in names)
        for values in found if isinstance(found, list) else [{}] * bool(found):
            yield rule.message.format(**sections, names=listed, has=has, them=them, **values)


def taken_names(run: Sections) -> list[dict[str, Any]]:
    """Return the names of reward functions that clash with names of the run. Only names in the settings are checked,
    since functions are not loaded."""
    specs = [spec for spec in run.rewards.specs if spec.name or is_live_name(spec.function)]
    labels = {spec.name or label_of_live(spec.function) for spec in specs}
    return [{"name": name} for name in sorted(filter(is_taken, labels))]


def unread(names: str, when: Callable[[Sections], bool], reason: str, way_out: str) -> Rule:
    """Build the rule about settings that have no effect.

    `reason` completes the sentence "they have no effect …", and `way_out` is the alternative to leaving them out.
    """
    return Rule(names, when, f"{{names}} {{has}} no effect {reason}; leave {{them}} out, or {way_out}")


def read_by_other_engines(name: str, engine: Engine) -> Rule:
    """Build the rule about the settings of vLLM that an engine does not read."""
    names = VLLM_SETTINGS - engine.reads
    readers = " or ".join(engines_where(lambda other: bool(other.reads & names)))
    disable = "" if engine.reads else ", disable them with `use_vllm: false`"
    return Rule(
        " ".join(names),
        lambda run: run.rollout.engine == name,
        f"{{names}}: no effect on `engine` {name}; leave them out{disable}, or set `engine` to {readers}",
    )


def ignored_by_own_loss(run: Sections, name: str) -> bool:
    """Return whether the source of the user's loss never reads a setting. If there is no source, return False."""
    source = read_source(run.algorithm.loss_type) if run.algorithm.has_own_loss else None
    return source is not None and name not in source.attributes


def averages_turns(run: Sections) -> bool:
    """Return whether the gradient of the loss depends on turns by their mean advantage alone."""
    algorithm = run.algorithm
    is_averaged = algorithm.importance_sampling_level == "sequence" and algorithm.loss_type != "cispo"
    return algorithm.turn_advantages != "none" and is_averaged and not algorithm.has_own_loss


def low_delta(run: Sections) -> list[dict[str, Any]]:
    """Return the upper clip bound and its setting if `delta` is not above it."""
    algorithm = run.algorithm
    name = "epsilon" if algorithm.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(algorithm, name)
    reads_delta = not algorithm.has_own_loss and algorithm.loss_type not in ("cispo", "sapo")
    is_low = reads_delta and algorithm.delta is not None and algorithm.delta <= upper
    return [{"name": name, "upper": upper}] if is_low else []


def unexpanded(run: Sections) -> list[dict[str, Any]]:
    """Return the advice about `output_dir` if it has parts that only a shell expands."""
    path = run.train.output_dir
    if not path.startswith("~") and "$" not in path:
        return []
    expanded = os.path.expandvars(os.path.expanduser(path))
    is_known = not expanded.startswith("~") and "$" not in expanded
    instead = f"write {expanded}, or leave it to the shell, without quotes" if is_known else "write the whole path"
    return [{"instead": instead}]


def entry_rules(which: Which) -> tuple[Rule, ...]:
    """Build the rules about the entries of the training or the held-out data."""
    key, split = NAMES[which], SPLITS[which]
    return (
        Rule(key, lambda run: getattr(run.data, key) == [], f"`{key}` is an empty list; name data, or write null"),
        Rule(
            split,
            lambda run: has_other_split(run.data, which),
            f"`{key}` {{data.{key}}} ends with another split than `{split}` {{data.{split}}}; keep one of them",
        ),
        Rule(
            key,
            lambda run: with_two_splits(run.data, which),
            f"`{key}` has an entry {{name}} that ends with another split than its `split` {{split}}; keep one",
        ),
        Rule(
            key,
            lambda run: len({entry.weight is None for entry in run.data.entries(which)}) > 1,
            f"`{key}` has entries with and without `weight`; give every entry one, or none",
        ),
        Rule(
            key,
            lambda run: repeated_entry(run.data, which),
            f"`{key}` has {{name}} several times; name it once, with a `weight` to draw it more often",
        ),
    )


def takes_steps(run: Sections) -> bool:
    """Return whether an environment takes the turns as steps."""
    return run.rollout.environment is not None and run.rollout.environment_protocol == "steps"


def has_no_reward(run: Sections) -> bool:
    """Return whether nothing can score completions. The class of an environment may have a method for it."""
    return not run.rewards.reward_funcs and run.rollout.environment is None


def changes_base(run: Sections) -> bool:
    """Return whether the initialisation of the adapter changes the base weights."""
    return run.model.init_lora_weights in CHANGING_THE_BASE


def named(holds: Callable[[Engine], bool]) -> str:
    """Return the engines for which `holds` returns true, as a text."""
    return " or ".join(engines_where(holds))


SYNCED, OF_POLICY = named(lambda engine: engine.has_own_weights), named(lambda engine: not engine.has_own_weights)
APART = named(lambda engine: not engine.shares_device)
IN_4_BITS = named(lambda engine: engine.samples_4_bit_weights)
UNTRUNCATED = named(lambda engine: engine.has_untruncated_logprobs)

# fmt: off
UNREAD = (
    unread("lora_r lora_alpha lora_target_modules lora_exclude_modules init_lora_weights use_rslora",
           lambda run: not run.model.use_peft,
           "without `use_peft`: no adapter is added", "set `use_peft: true`"),
    unread("verify_length", lambda run: run.model.verify != "full",
           "without `verify: full`: no completion is made up", "set `verify: full`"),
    unread("bnb_4bit_quant_type use_bnb_nested_quant", lambda run: not run.model.load_in_4bit,
           "without `load_in_4bit`: weights are not quantized", "set `load_in_4bit: true`"),
    unread("dataset_train_split", lambda run: run.data.dataset_name is None,
           "without `dataset_name`, the data to train on", "name these data"),
    unread("dataset_train_split", lambda run: reads_no_split(run.data, "train"),
           "on a file, which is one split, or beside a `split` of each entry", "name the file of that split"),
    unread("dataset_test_split", lambda run: reads_no_split(run.data, "eval"),
           "on a file, which is one split, or beside a `split` of each entry", "name the file of that split"),
    unread("dataset_config", lambda run: all(map(reads_no_config, all_entries(run.data))),
           "without data of the hub or a directory", "name such data"),
    unread("dataset_test_split", lambda run: run.data.eval_dataset_name is None,
           "without `eval_dataset_name`, the data to evaluate on", "name these data"),
    unread("dataloader_prefetch_factor", lambda run: run.data.dataloader_num_workers == 0,
           "without `dataloader_num_workers`: only workers prefetch", "set `dataloader_num_workers` above 0"),
    unread("weight_sync_steps agreement_steps lora_sync", lambda run: not run.rollout.facts.has_own_weights,
           f"on `engine` {OF_POLICY}, which samples from the trained weights themselves", f"set `engine` to {SYNCED}"),
    unread("ds3_gather_for_generation", lambda run: run.rollout.facts.has_own_weights,
           "on an engine with weights of its own", f"set `engine` to {OF_POLICY}"),
    unread("max_turns max_turn_tokens max_environments tool_timeout tool_errors observation_role tool_format "
           "environment_protocol environment_kwargs environment_isolation environment_memory keep_images edit_every",
           lambda run: not run.rollout.has_tools,
           "without `tools` or `environment`: a completion is one turn", "name tools"),
    unread("max_environments environment_protocol environment_kwargs environment_isolation environment_memory",
           lambda run: run.rollout.has_tools and run.rollout.environment is None,
           "without `environment`: tools have no instances", "name a class in `environment`"),
    unread("environment_memory",
           lambda run: run.rollout.environment is not None and run.rollout.environment_isolation == "thread",
           "with `environment_isolation` thread: the memory is the run's", "set `environment_isolation` to process"),
    unread("environment_kwargs",
           lambda run: run.rollout.environment is not None and run.rollout.environment_protocol == "tools",
           "with `environment_protocol` tools, whose class is made without arguments",
           "set `environment_protocol` to steps"),
    unread("tool_format observation_role", takes_steps,
           "with `environment_protocol` steps: the model calls no tools", "set `environment_protocol` to tools"),
    unread("edit_every", lambda run: run.rollout.keep_images is None,
           "without `keep_images`: contexts hold all images, and are not edited", "set `keep_images`"),
    unread("turn_discount", lambda run: run.algorithm.turn_advantages == "none",
           "without `turn_advantages`: all turns have the advantage of their completion",
           "set `turn_advantages` to return or gigpo"),
    unread("turn_weight", lambda run: run.algorithm.turn_advantages != "gigpo",
           "without `turn_advantages: gigpo`", "set that"),
    unread("num_generations_eval eval_temperature", lambda run: run.data.eval_dataset_name is None,
           "without `eval_dataset_name`, the data to evaluate on", "name these data"),
    unread("sapo_temperature_neg sapo_temperature_pos",
           lambda run: not run.algorithm.has_own_loss and run.algorithm.loss_type != "sapo",
           "on a `loss_type` other than sapo", "set `loss_type: sapo`"),
    unread("epsilon epsilon_high delta", lambda run: run.algorithm.loss_type == "sapo",
           "on `loss_type` sapo, which has no clip", "choose another loss"),
    unread("epsilon delta", lambda run: run.algorithm.loss_type == "cispo",
           "on `loss_type` cispo, which bounds the ratio by `epsilon_high` alone", "choose another loss"),
    unread("loss_weights", lambda run: not run.algorithm.has_own_loss,
           "on a built-in `loss_type`, which has its own", "name a function of your own in `loss_type`"),
    *(unread(name, partial(ignored_by_own_loss, name=name),
             "on a `loss_type` of your own whose source does not read it", f"read `algorithm.{name}` in the function")
      for name in ("epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos")),
    unread("loss_normalizer", lambda run: run.algorithm.has_own_loss and run.algorithm.loss_weights != "token",
           "on `loss_weights` other than token", "set `loss_weights: token`"),
    unread("loss_normalizer",
           lambda run: not run.algorithm.has_own_loss and run.algorithm.loss_type not in ("dapo", "cispo"),
           "on a `loss_type` other than dapo and cispo", "choose one of these"),
    unread("use_bias_correction_kl", lambda run: run.algorithm.beta == 0,
           "without `beta`: there is no KL term", "set `beta` above 0"),
    unread("ref_model_mixup_alpha ref_model_sync_steps", lambda run: not run.algorithm.sync_ref_model,
           "without `sync_ref_model`: the reference model does not move", "set `sync_ref_model: true`"),
    unread("vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
           lambda run: not run.algorithm.vllm_importance_sampling_correction,
           "without `vllm_importance_sampling_correction`", "set that to true"),
    unread("adam_beta1 adam_beta2 adam_epsilon", lambda run: run.train.optim == "adafactor",
           "on `optim` adafactor, which has no such moments", "set `optim` to adamw_torch or adamw_8bit"),
    unread("warmup_steps", lambda run: run.train.lr_scheduler_type == "constant",
           "on `lr_scheduler_type` constant", "use constant_with_warmup"),
    unread("metric_for_best_model greater_is_better", lambda run: not run.train.load_best_model_at_end,
           "without `load_best_model_at_end`: no checkpoint is selected", "set that to true"),
    unread("gradient_checkpointing",
           lambda run: run.memory.gradient_checkpointing == "vision_tower" and run.model.freeze_vision_tower,
           "on a frozen vision tower, which keeps no activations", "use language_model"),
    unread("shared_attention",
           lambda run: run.memory.prefix_sharing == "dense" or run.model.attn_implementation == "eager",
           "without shared rows", "leave out `prefix_sharing: dense` and `attn_implementation: eager`"),
    unread("endpoint_max_concurrency endpoint_timeout endpoint_max_retries",
           lambda run: run.evaluation.endpoint_url is None,
           "without `endpoint_url`", "give the address of the endpoint"),
    unread("logging_steps run_name", lambda run: not run.log.report_to,
           "without `report_to`: `metrics.jsonl` has every step", "name a tracker"),
)
"""Settings that have no effect because of other settings."""

OF_OTHER_RUNS = (
    Rule("max_staleness", lambda run: run.rollout.facts.shares_device,
         f"`max_staleness` needs `engine` {APART}: {{rollout.engine}} shares its device with the trainer"),
    *(read_by_other_engines(name, engine) for name, engine in ENGINES.items() if VLLM_SETTINGS - engine.reads),
    Rule("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
         "vllm_importance_sampling_clip_min",
         lambda run: not run.rollout.is_off_policy,
         "{names}: no effect on `engine` {rollout.engine} without `max_rollout_tokens`, because it samples from the "
         "current weights; leave them out, or disable them with `use_vllm: false`"),
    Rule("eval_steps", lambda run: run.data.eval_dataset_name is None,
         "`eval_steps` {train.eval_steps} needs `eval_dataset_name`, the data to evaluate on"),
)
"""Settings that need another engine or held-out data, and have no effect without."""

WITHOUT_EFFECT = UNREAD + OF_OTHER_RUNS

CONFLICTS = (
    Rule("trainable_modules", lambda run: run.model.trainable_modules is not None and run.model.use_peft,
         "`trainable_modules` cannot be used with `use_peft`, which trains an adapter and no other weights; choose the "
         "adapter's modules with `lora_target_modules`, or set `use_peft` to false"),
    Rule("trainable_modules", lambda run: run.model.trainable_modules is not None and run.model.freeze_vision_tower,
         "`trainable_modules` and `freeze_vision_tower` are both given; keep one of them: `trainable_modules` freezes "
         "all modules that it does not name"),
    Rule("freeze_vision_tower lora_target_modules",
         lambda run: run.model.freeze_vision_tower
         and not {"projector", "vision_tower"}.isdisjoint(named_parts(run.model.lora_target_modules)),
         "`lora_target_modules` names the vision tower or its projector, which `freeze_vision_tower` freezes; leave "
         "one of the two settings out"),
    Rule("max_rollout_tokens",
         lambda run: (run.rollout.max_rollout_tokens or 0) >= run.rollout.max_completion_length,
         "`max_rollout_tokens` {rollout.max_rollout_tokens} has no effect: it must be below `max_completion_length` "
         "{rollout.max_completion_length} to pause a completion"),
    Rule("max_rollout_tokens", lambda run: run.rollout.has_tools,
         "`max_rollout_tokens` cannot be used with `tools` or `environment`: a paused completion would need its "
         "environment later; leave it out, or limit a turn with `max_turn_tokens`"),
    Rule("max_turn_tokens",
         lambda run: run.rollout.has_tools and (run.rollout.max_turn_tokens or 0) >= run.rollout.max_completion_length,
         "`max_turn_tokens` {rollout.max_turn_tokens} has no effect: it must be below `max_completion_length` "
         "{rollout.max_completion_length}, which counts all turns"),
    Rule("tools", lambda run: takes_steps(run) and bool(run.rollout.tools),
         "`tools` cannot be used with `environment_protocol` steps: each turn is a step; leave them out, or write the "
         "environment with tools"),
    Rule("dataset_name eval_dataset_name",
         lambda run: has_draws(run.data) and not isinstance(run.rollout.environment, str),
         "`draws:` in {names} needs a class in `environment`, which makes the tasks"),
    Rule("environment_kwargs",
         lambda run: bool(run.rollout.environment_kwargs) and isinstance(run.rollout.environment, dict),
         "`environment_kwargs` cannot be used with several classes in `environment`: all would get the same arguments"),
    Rule("environment", lambda run: run.rollout.environment == {},
         "`environment` is an empty mapping; name classes, or write null"),
    Rule("endpoint_url", lambda run: run.rollout.has_tools,
         "`endpoint_url` cannot be used with `tools` or `environment`: endpoints return no token ids, and the next "
         "turn needs them; leave it out, and name a checkpoint"),
    Rule("video_format", lambda run: run.evaluation.endpoint_url is not None and run.data.video_format == "native",
         "`video_format` native cannot be used with `endpoint_url`: endpoints get each frame of a video as an image; "
         "leave it out"),
    Rule("max_rollout_tokens max_resampling_rounds", lambda run: run.shares_engines,
         "{names} cannot be used with `vllm_tensor_parallel_size` above 1 and `engine` {rollout.engine}: ranks that "
         "share a model must call it the same number of times"),
    Rule(" ".join(READ_BY_STARTED_SERVERS), lambda run: bool(run.vllm.vllm_server_base_url),
         "{names}: these apply to servers that the run starts, and with `vllm_server_base_url` it starts none; leave "
         "them out, or give them to the command that starts the servers"),
    Rule("vllm_server_devices",
         lambda run: [{"sets": n} for n in [len(run.vllm.vllm_server_devices)] if n != run.vllm.vllm_num_servers],
         "`vllm_server_devices` names {sets} sets of devices for `vllm_num_servers` {vllm.vllm_num_servers}; give one "
         "per server"),
    Rule("reward_weights",
         lambda run: [{"weights": weights, "functions": functions}
                      for weights, functions in [(len(run.rewards.reward_weights or []), len(run.rewards.reward_funcs))]
                      if weights != functions],
         "`reward_weights` has {weights} entries for {functions} `reward_funcs`; give one per function"),
    Rule("reward_weights", lambda run: any(spec.weight != 1.0 for spec in run.rewards.specs),
         "`reward_weights` and a `weight` in `reward_funcs` are both given; keep one of them"),
    Rule("num_generations_eval", lambda run: run.rollout.eval_temperature == 0,
         "`num_generations_eval` > 1 repeats the same greedy completion; set `eval_temperature` above 0"),
    Rule("loss_type", lambda run: run.algorithm.loss_type == "cispo" and run.algorithm.epsilon_high is None,
         "`loss_type` cispo needs `epsilon_high`, the upper bound of its weights, for instance 5.0"),
    Rule("turn_advantages", lambda run: not run.rollout.has_tools,
         "`turn_advantages` {algorithm.turn_advantages} needs `tools` or `environment`: without them a completion is "
         "one turn; leave it out"),
    Rule("turn_advantages", averages_turns,
         "`turn_advantages` {algorithm.turn_advantages} cannot be used with `importance_sampling_level: sequence` and "
         "`loss_type` {algorithm.loss_type}: a ratio per completion gives all its turns the mean of their advantages; "
         "use the level token, or `loss_type: cispo`, whose ratio is a constant weight"),
    Rule("delta", low_delta,
         "`delta` {algorithm.delta:g} is not above 1 + `{name}` = {upper:g}, where the ratio is clipped already; set "
         "it higher, or leave it out"),
    Rule("sync_ref_model", lambda run: run.algorithm.beta == 0,
         "`sync_ref_model` needs `beta` above 0: without a KL term there is no reference model"),
    Rule("sync_ref_model", lambda run: run.model.use_peft,
         "`sync_ref_model` cannot be used with `use_peft`: the reference is then the model without its adapter"),
    Rule("vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max",
         lambda run: 0 < run.algorithm.vllm_importance_sampling_clip_max
                       <= run.algorithm.vllm_importance_sampling_clip_min,
         "`vllm_importance_sampling_clip_min` {algorithm.vllm_importance_sampling_clip_min:g} is not below "
         "`vllm_importance_sampling_clip_max` {algorithm.vllm_importance_sampling_clip_max:g}; lower the first or "
         "raise the second (0: no upper bound)"),
    Rule("init_lora_weights", lambda run: changes_base(run) and run.algorithm.beta > 0 and run.model.use_peft,
         "`init_lora_weights` {model.init_lora_weights} changes the base weights, so the model without its adapter "
         "cannot be the reference for `beta` {algorithm.beta:g}; use true, false, gaussian or orthogonal, or set "
         "`beta` to 0"),
    Rule("load_in_4bit", lambda run: not run.model.use_peft,
         "`load_in_4bit` needs `use_peft: true`: 4-bit weights have no gradients, so an adapter is trained"),
    Rule("load_in_4bit", changes_base,
         "`init_lora_weights` {model.init_lora_weights} changes the base weights, which `load_in_4bit` keeps in 4 "
         "bits; use true, false, gaussian or orthogonal"),
    Rule("load_in_4bit",
         lambda run: not run.rollout.facts.samples_4_bit_weights and run.evaluation.endpoint_url is None,
         "`load_in_4bit` cannot be used with `engine` {rollout.engine}: {rollout.facts.title} has no 4-bit weights of "
         "bitsandbytes, and would sample from the unquantized model, which is not the policy that is trained; set "
         f"`engine` to {IN_4_BITS}"),
    Rule("lr_scheduler_kwargs", schedules.unknown_arguments,
         "`lr_scheduler_kwargs` has {found}; valid for `lr_scheduler_type` {train.lr_scheduler_type}: {valid}"),
    Rule("lr_scheduler_kwargs", schedules.wrong_arguments,
         "`{name}` in `lr_scheduler_kwargs` is {value!r}: {why}"),
    Rule("lr_scheduler_kwargs", schedules.min_lr_above_peak,
         "`min_lr` {train.lr_scheduler_kwargs[min_lr]:g} in `lr_scheduler_kwargs` is above the peak, `learning_rate` "
         "{train.learning_rate:g}; lower the first or raise the second"),
    Rule("lr_scheduler_type", schedules.end_above_peak,
         "`lr_end` {end:g} in `lr_scheduler_kwargs` (default {default:g}) is not below the peak, `learning_rate` "
         "{train.learning_rate:g}; lower the first or raise the second"),
    Rule("lr_scheduler_type",
         lambda run: run.train.lr_scheduler_type == "cosine_with_min_lr"
                     and len(run.train.lr_scheduler_kwargs.keys() & {"min_lr", "min_lr_rate"}) != 1,
         "`lr_scheduler_type` cosine_with_min_lr needs one of `min_lr` and `min_lr_rate` in `lr_scheduler_kwargs`"),
    Rule("lr_scheduler_type",
         lambda run: run.train.lr_scheduler_type == "warmup_stable_decay"
                     and "num_decay_steps" not in run.train.lr_scheduler_kwargs,
         "`lr_scheduler_type` warmup_stable_decay needs `num_decay_steps` in `lr_scheduler_kwargs`"),
    Rule("reward_funcs", taken_names, f"a reward function cannot be called {{name!r}}: {TAKEN_NAME}"),
    Rule("endpoint_url", lambda run: wrong_addresses([run.evaluation.endpoint_url or ""]),
         "`endpoint_url` {url}: {why}"),
    Rule("vllm_server_base_url", lambda run: wrong_addresses(run.vllm.vllm_server_base_url),
         "`vllm_server_base_url` {url}: {why}"),
    Rule("output_dir", unexpanded,
         "`output_dir` {train.output_dir}: `~` and `$` are not expanded, so this would be a directory of that name; "
         "{instead}"),
    *entry_rules("train"), *entry_rules("eval"),
    Rule("eval_dataset_name", lambda run: any(entry.weight is not None for entry in run.data.entries("eval")),
         "`eval_dataset_name` has a `weight`: of held-out data every row is evaluated once; leave it out"),
    Rule("columns dataset_name eval_dataset_name", lambda run: repeated_columns(run.data),
         "`columns` reads {name} as several columns; name it once"),
    Rule("columns dataset_name eval_dataset_name", lambda run: ignored_columns(run.data),
         "`columns` and `ignore_columns` both name {columns}; keep one of them"),
    *(Rule(name, lambda run, name=name: all_entries_have(run.data, name),
           f"`{name}` has no effect: every entry of the data has its own; leave it out") for name in OWN_SETTINGS),
    Rule("min_pixels", lambda run: run.data.max_pixels is not None and (run.data.min_pixels or 0) > run.data.max_pixels,
         "`min_pixels` {data.min_pixels} is above `max_pixels` {data.max_pixels}"),
    Rule("fps num_frames", lambda run: run.data.fps is not None and run.data.num_frames is not None,
         "`fps` {data.fps} and `num_frames` {data.num_frames} both choose the number of frames of a video; keep one"),
    Rule("min_frames max_frames", lambda run: run.data.min_frames > run.data.max_frames,
         "`min_frames` {data.min_frames} is above `max_frames` {data.max_frames}"),
    Rule("num_frames max_frames min_frames",
         lambda run: run.data.num_frames is not None
                     and not run.data.min_frames <= run.data.num_frames <= run.data.max_frames,
         "`num_frames` {data.num_frames} is not between `min_frames` {data.min_frames} and `max_frames` "
         "{data.max_frames}"),
    Rule("video_min_pixels",
         lambda run: run.data.video_max_pixels is not None
                     and (run.data.video_min_pixels or 0) > run.data.video_max_pixels,
         "`video_min_pixels` {data.video_min_pixels} is above `video_max_pixels` {data.video_max_pixels}"),
    Rule("load_best_model_at_end", lambda run: run.data.eval_dataset_name is None or not run.train.eval_steps,
         "`load_best_model_at_end` needs `eval_dataset_name` and `eval_steps` above 0"),
    Rule("load_best_model_at_end",
         lambda run: run.data.eval_dataset_name is not None and run.train.eval_steps > 0
                     and (run.train.save_steps == 0 or run.train.save_steps % run.train.eval_steps > 0),
         "`load_best_model_at_end` needs `save_steps` to be a multiple of `eval_steps` {train.eval_steps}, so that "
         "every saved checkpoint has been evaluated; it is {train.save_steps}"),
)
"""Settings that do not go together."""

FOR_TRAINING = (
    Rule("", lambda run: run.data.dataset_name is None and run.rollout.environment is None,
         "`data.dataset_name`, the training data, is not set"),
    Rule("", lambda run: run.data.dataset_name is None and run.rollout.environment is not None,
         "`data.dataset_name` is not set; if the environment makes its own tasks, write how many, as in draws:1000"),
    Rule("", has_no_reward,
         "`rewards.reward_funcs` is empty: training needs at least one reward function"),
    Rule("reward_funcs",
         lambda run: run.rollout.environment is None
                     and not any(run.rewards.reward_weights or [spec.weight for spec in run.rewards.specs]),
         "every reward function has weight 0, so that no reward differs from another: give one a weight"),
    Rule("num_generations", lambda run: run.rollout.num_generations < 2,
         "`rollout.num_generations` is 1: an advantage compares at least 2 completions of one prompt"),
    Rule("top_p top_k min_p",
         lambda run: not run.rollout.facts.has_untruncated_logprobs
                     and (run.rollout.top_p < 1 or run.rollout.top_k > 0 or bool(run.rollout.min_p)),
         "`rollout.engine` is {rollout.engine}: with `top_p`, `top_k` or `min_p` {rollout.facts.title} returns "
         "log-probs after these filters, and training needs log-probs before them; unset them, or use the engine "
         f"{UNTRUNCATED}"),
    Rule("endpoint_url", lambda run: True,
         "`evaluation.endpoint_url` is for `rl-vlm eval`: a run evaluates what it trains; leave it out"),
)
"""Settings that a run needs, and settings that only an evaluation can use."""

FOR_EVALUATION = (
    Rule("", lambda run: run.data.eval_dataset_name is None, "`data.eval_dataset_name`, the held-out data, is not set"),
    Rule("", has_no_reward,
         "`rewards.reward_funcs` is empty: evaluation needs at least one reward function"),
)
"""Settings that an evaluation needs."""
# fmt: on
