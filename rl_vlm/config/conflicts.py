"""Settings that contradict each other, or have no effect. Every message names the settings and a solution."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rl_vlm.config.addresses import why_no_address
from rl_vlm.config.data_sources import conflicts_of_sources
from rl_vlm.config.engines import engines_where
from rl_vlm.config.secrets import without_secrets
from rl_vlm.config.typed import why_not
from rl_vlm.config.unread import unread_settings

if TYPE_CHECKING:
    from rl_vlm.config.schema import RunConfig, Section

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Steps = Annotated[int | None, Field(ge=0)]
Shape = Literal["linear", "cosine", "1-sqrt"]

SCHEDULE_KWARGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"num_cycles": Number},
    "cosine_with_restarts": {"num_cycles": Count},
    "polynomial": {"lr_end": Number, "power": Number},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": Annotated[int | None, Field(ge=1)]},
    "cosine_with_min_lr": {"min_lr": Number, "min_lr_rate": Share, "num_cycles": Number},
    "warmup_stable_decay": {
        "num_decay_steps": Count, "num_stable_steps": Steps, "warmup_type": Shape,
        "decay_type": Shape, "min_lr_ratio": Share, "num_cycles": Number,
    },
}  # fmt: skip
"""Arguments that `transformers.get_scheduler` passes to each schedule, with their types."""
POLYNOMIAL_LR_END = 1e-7
"""Default of `lr_end` in transformers."""


def conflicts_of(config: RunConfig) -> Iterator[str]:
    """Yield one message per conflict."""
    yield from unread_settings(config)
    yield from _model_conflicts(config)
    yield from _memory_conflicts(config)
    yield from _rollout_conflicts(config)
    yield from _vllm_conflicts(config)
    yield from _reward_conflicts(config)
    yield from _algorithm_conflicts(config)
    yield from _quantization_conflicts(config)
    yield from _schedule_conflicts(config)
    yield from _address_conflicts(config)
    yield from _path_conflicts(config)
    yield from _train_conflicts(config)


def _changed(section: Section) -> list[str]:
    """Return the names of the settings of a section that differ from their defaults."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def _memory_conflicts(config: RunConfig) -> Iterator[str]:
    if config.memory.expandable_segments and config.vllm.vllm_enable_sleep_mode:
        yield (
            "`expandable_segments` cannot be used with `vllm_enable_sleep_mode`: vLLM cannot put such segments to "
            "sleep; leave one of them out"
        )


def _model_conflicts(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.trainable_modules is not None and model.use_peft:
        yield (
            "`trainable_modules` cannot be used with `use_peft`, which trains an adapter and no other weights; choose "
            "the adapter's modules with `lora_target_modules`, or set `use_peft` to false"
        )
    if model.trainable_modules is not None and model.freeze_vision_tower:
        yield (
            "`trainable_modules` and `freeze_vision_tower` are both given; keep one of them: `trainable_modules` "
            "freezes all modules that it does not name"
        )


def _rollout_conflicts(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.max_staleness and rollout.facts.shares_device:
        apart = " or ".join(engines_where(lambda engine: not engine.shares_device))
        yield f"`max_staleness` needs `engine` {apart}: {rollout.engine} shares its device with the trainer"
    if rollout.max_rollout_tokens and rollout.max_rollout_tokens >= rollout.max_completion_length:
        yield (
            f"`max_rollout_tokens` {rollout.max_rollout_tokens} has no effect: it must be below "
            f"`max_completion_length` {rollout.max_completion_length} to pause a completion"
        )
    varies = [name for name in ("max_rollout_tokens", "max_resampling_rounds") if getattr(rollout, name)]
    if rollout.facts.spans_ranks and config.vllm.vllm_tensor_parallel_size > 1 and varies:
        yield (
            f"`{varies[0]}` cannot be used with `vllm_tensor_parallel_size` above 1 and `engine` {rollout.engine}: "
            "ranks that share a model must call it the same number of times"
        )


READ_BY_STARTED_SERVERS = (
    "vllm_model_impl", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
    "vllm_enforce_eager", "vllm_num_servers", "vllm_server_devices",
)  # fmt: skip
"""Settings that a server reads when it starts. A run that joins the server ignores them."""


def _vllm_conflicts(config: RunConfig) -> Iterator[str]:
    reads, settings = config.rollout.facts.reads, config.vllm
    changed = _changed(settings)
    unread = [name for name in changed if name not in reads]
    if unread:
        names = ", ".join(f"`{name}`" for name in unread)
        readers = engines_where(lambda engine: unread[0] in engine.reads if reads else bool(engine.reads))
        disable = "" if reads else ", disable them with `use_vllm: false`"
        yield (
            f"{names}: no effect on `engine` {config.rollout.engine}; leave them out{disable}, or set `engine` to "
            f"{' or '.join(readers)}"
        )
    if settings.vllm_server_base_url and (starting := set(changed).intersection(READ_BY_STARTED_SERVERS)):
        names = ", ".join(f"`{name}`" for name in sorted(starting))
        yield (
            f"{names}: these apply to servers that the run starts, and with `vllm_server_base_url` it starts none; "
            "leave them out, or give them to the command that starts the servers"
        )
    if settings.vllm_server_devices and len(settings.vllm_server_devices) != settings.vllm_num_servers:
        yield (
            f"`vllm_server_devices` names {len(settings.vllm_server_devices)} sets of devices for "
            f"`vllm_num_servers` {settings.vllm_num_servers}; give one per server"
        )


def _reward_conflicts(config: RunConfig) -> Iterator[str]:
    funcs, weights = config.rewards.reward_funcs, config.rewards.reward_weights
    if weights is not None and len(weights) != len(funcs):
        yield f"`reward_weights` has {len(weights)} entries for {len(funcs)} `reward_funcs`; give one per function"
    if weights is not None and any(spec.weight != 1.0 for spec in config.rewards.specs):
        yield "`reward_weights` and a `weight` in `reward_funcs` are both given; keep one of them"
    if config.rollout.num_generations_eval > 1 and config.rollout.eval_temperature == 0:
        yield "`num_generations_eval` > 1 repeats the same greedy completion; set `eval_temperature` above 0"


def _algorithm_conflicts(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.loss_type == "cispo" and algorithm.epsilon_high is None:
        yield "`loss_type` cispo needs `epsilon_high`, the upper bound of its weights, for instance 5.0"
    name = "epsilon" if algorithm.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(algorithm, name)
    reads_delta = not algorithm.has_own_loss and algorithm.loss_type not in ("cispo", "sapo")
    if reads_delta and algorithm.delta is not None and algorithm.delta <= upper:
        yield (
            f"`delta` {algorithm.delta:g} is not above 1 + `{name}` = {upper:g}, where the ratio is clipped already; "
            "set it higher, or leave it out"
        )
    if algorithm.sync_ref_model and algorithm.beta == 0:
        yield "`sync_ref_model` needs `beta` above 0: without a KL term there is no reference model"
    if algorithm.sync_ref_model and config.model.use_peft:
        yield "`sync_ref_model` cannot be used with `use_peft`: the reference is then the model without its adapter"
    unread = [name for name in _changed(algorithm) if name.startswith("vllm_importance_sampling_")]
    if unread and not config.rollout.is_off_policy:
        names = ", ".join(f"`{name}`" for name in unread)
        yield (
            f"{names}: no effect on `engine` {config.rollout.engine} without `max_rollout_tokens`, because it samples "
            "from the current weights; leave them out, or disable them with `use_vllm: false`"
        )
    low, high = algorithm.vllm_importance_sampling_clip_min, algorithm.vllm_importance_sampling_clip_max
    if high and low >= high:
        yield (
            f"`vllm_importance_sampling_clip_min` {low:g} is not below `vllm_importance_sampling_clip_max` {high:g}; "
            "lower the first or raise the second (0: no upper bound)"
        )
    model = config.model
    if algorithm.beta > 0 and model.use_peft and model.init_lora_weights in ("pissa", "olora"):
        yield (
            f"`init_lora_weights` {model.init_lora_weights} changes the base weights, so the model without its "
            f"adapter cannot be the reference for `beta` {algorithm.beta:g}; "
            "use true, false, gaussian or orthogonal, or set `beta` to 0"
        )


def _quantization_conflicts(config: RunConfig) -> Iterator[str]:
    model, engine = config.model, config.rollout.facts
    if not model.load_in_4bit:
        return
    if not model.use_peft:
        yield "`load_in_4bit` needs `use_peft: true`: 4-bit weights have no gradients, so an adapter is trained"
    if model.init_lora_weights in ("pissa", "olora"):
        yield (
            f"`init_lora_weights` {model.init_lora_weights} changes the base weights, which `load_in_4bit` keeps in "
            "4 bits; use true, false, gaussian or orthogonal"
        )
    if not engine.samples_4_bit_weights and config.evaluation.endpoint_url is None:
        others = " or ".join(engines_where(lambda other: other.samples_4_bit_weights))
        yield (
            f"`load_in_4bit` cannot be used with `engine` {config.rollout.engine}: {engine.title} has no 4-bit weights "
            "of bitsandbytes, and would sample from the unquantized model, which is not the policy that is trained; "
            f"set `engine` to {others}"
        )


def _schedule_conflicts(config: RunConfig) -> Iterator[str]:
    schedule, values = config.train.lr_scheduler_type, config.train.lr_scheduler_kwargs
    given, known = values.keys(), SCHEDULE_KWARGS[schedule]
    if unknown := given - set(known):
        found, valid = ", ".join(sorted(unknown)), ", ".join(known) or "none"
        yield f"`lr_scheduler_kwargs` has {found}; valid for `lr_scheduler_type` {schedule}: {valid}"
    wrong = {name: why for name in known if name in given and (why := why_not(values[name], known[name]))}
    yield from (f"`{name}` in `lr_scheduler_kwargs` is {values[name]!r}: {why}" for name, why in wrong.items())
    yield from () if wrong else _peak_conflicts(config)
    if schedule == "cosine_with_min_lr" and len(given & {"min_lr", "min_lr_rate"}) != 1:
        yield "`lr_scheduler_type` cosine_with_min_lr needs one of `min_lr` and `min_lr_rate` in `lr_scheduler_kwargs`"
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield "`lr_scheduler_type` warmup_stable_decay needs `num_decay_steps` in `lr_scheduler_kwargs`"


def _peak_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a message if a schedule ends above its peak. The types of the arguments are checked already."""
    values, peak = config.train.lr_scheduler_kwargs, config.train.learning_rate
    if values.get("min_lr", 0.0) > peak:
        yield (
            f"`min_lr` {values['min_lr']:g} in `lr_scheduler_kwargs` is above the peak, `learning_rate` {peak:g}; "
            "lower the first or raise the second"
        )
    end = values.get("lr_end", POLYNOMIAL_LR_END)
    if config.train.lr_scheduler_type == "polynomial" and end >= peak:
        yield (
            f"`lr_end` {end:g} in `lr_scheduler_kwargs` (default {POLYNOMIAL_LR_END:g}) is not below the peak, "
            f"`learning_rate` {peak:g}; lower the first or raise the second"
        )


def _address_conflicts(config: RunConfig) -> Iterator[str]:
    endpoint = config.evaluation.endpoint_url
    given = {"endpoint_url": [endpoint] if endpoint else [], "vllm_server_base_url": config.vllm.vllm_server_base_url}
    for name, urls in given.items():
        yield from (f"`{name}` {without_secrets(url)}: {why}" for url in urls if (why := why_no_address(url)))


def _path_conflicts(config: RunConfig) -> Iterator[str]:
    path = config.train.output_dir
    if path.startswith("~") or "$" in path:
        expanded = os.path.expandvars(os.path.expanduser(path))
        is_known = not expanded.startswith("~") and "$" not in expanded
        instead = f"write {expanded}, or leave it to the shell, without quotes" if is_known else "write the whole path"
        yield f"`output_dir` {path}: `~` and `$` are not expanded, so this would be a directory of that name; {instead}"


def _train_conflicts(config: RunConfig) -> Iterator[str]:
    train, data = config.train, config.data
    yield from conflicts_of_sources(data)
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        yield f"`min_pixels` {data.min_pixels} is above `max_pixels` {data.max_pixels}"
    if train.eval_steps and data.eval_dataset_name is None:
        yield f"`eval_steps` {train.eval_steps} needs `eval_dataset_name`, the data to evaluate on"
    if train.load_best_model_at_end:
        if data.eval_dataset_name is None or not train.eval_steps:
            yield "`load_best_model_at_end` needs `eval_dataset_name` and `eval_steps` above 0"
        elif train.save_steps == 0 or train.save_steps % train.eval_steps:
            yield (
                f"`load_best_model_at_end` needs `save_steps` to be a multiple of `eval_steps` {train.eval_steps}, "
                f"so that every saved checkpoint has been evaluated; it is {train.save_steps}"
            )
