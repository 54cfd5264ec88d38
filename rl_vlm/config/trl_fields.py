"""Conversion of the fields of TRL 1.16's GRPOConfig, ModelConfig and GRPOScriptArguments.

Every field is in exactly one of three tables: `SAME` (same name and meaning here), `CONVERTED` into settings of this
project, or `NOT_HERE`. A field in `NOT_HERE` may be null or a value listed there; any other is refused.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from rl_vlm.config.data_names import split_name
from rl_vlm.config.trl_refused import NOT_HERE

FoundSettings = dict[str, Any]

TRL_PER_DEVICE_BATCH_SIZE = 8
"""TRL's default."""

SAME = frozenset(
    """
    model_name_or_path model_revision trust_remote_code attn_implementation
    use_peft lora_r lora_alpha use_rslora load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant

    dataset_name dataset_config dataset_train_split dataset_test_split chat_template_kwargs shuffle_dataset
    dataloader_num_workers dataloader_prefetch_factor

    num_generations num_generations_eval max_completion_length temperature top_p top_k min_p ds3_gather_for_generation
    reward_weights

    loss_type importance_sampling_level epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos
    beta use_bias_correction_kl sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    num_iterations mask_truncated_completions top_entropy_quantile
    vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_min

    vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
    vllm_server_base_url vllm_server_timeout

    output_dir seed per_device_train_batch_size gradient_accumulation_steps steps_per_generation num_train_epochs
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
    max_grad_norm save_steps save_total_limit eval_steps eval_on_start load_best_model_at_end greater_is_better
    ddp_timeout

    gradient_checkpointing logging_steps report_to run_name log_completions num_completions_to_print disable_tqdm
    """.split()
)


def _eval_strategy(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    if value in ("no", False):
        return {"eval_steps": 0}
    if value != "steps":
        raise ValueError("evaluations are counted in steps: give `eval_steps`")
    settings = {"eval_steps": given.get("eval_steps") or given.get("logging_steps", 10)}
    held_out = given.get("eval_dataset_name", given.get("dataset_name"))
    if isinstance(held_out, list) and "eval_dataset_name" not in given:
        raise ValueError("with a list of training data, also give `eval_dataset_name`, the held-out data")
    if isinstance(held_out, str) and "eval_dataset_name" not in given:
        held_out = split_name(held_out)[0]
    return settings | ({"eval_dataset_name": held_out} if held_out else {})


def _save_strategy(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    if value in ("no", False):
        return {"save_steps": 0}
    if value != "steps":
        raise ValueError("checkpoints are counted in steps: give `save_steps`, or `load_best_model_at_end`")
    return {}


def _reward_funcs(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert names of TRL's own functions and dotted import paths to `module:function`."""
    from_trl = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")

    def convert(name: Any) -> Any:
        if name in from_trl:
            return f"trl.rewards:{name}"
        if name == "get_soft_overlong_punishment":  # TRL's script calls it with these lengths
            return {"function": "overlong", "kwargs": {"max_completion_length": 1280, "soft_punish_cache": 256}}
        if isinstance(name, str) and "." in name and ":" not in name:
            return ":".join(name.rsplit(".", 1))
        return name

    return {"reward_funcs": [convert(name) for name in value] if isinstance(value, list) else convert(value)}


def _scale_rewards(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    if isinstance(value, bool):
        value = "group" if value else "none"
    return {"scale_rewards": value}


def _use_vllm(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Choose the engine and the server to join.

    TRL joins a running server by its URL, or by host and port; its default host 0.0.0.0 means this machine.
    """
    if not value:
        return {} if value is None else {"engine": "hf"}
    mode = given.get("vllm_mode") or "colocate"
    if mode == "colocate":
        return {"engine": "vllm"}
    if mode != "server":
        raise ValueError(f"`vllm_mode` is {mode!r}: it should be 'colocate' or 'server'")
    host, port = given.get("vllm_server_host") or "0.0.0.0", given.get("vllm_server_port") or 8000
    url = given.get("vllm_server_base_url") or f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    return {"engine": "vllm_server", "vllm_server_base_url": url}


def _vllm_mode(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    if "use_vllm" not in given and value != "colocate":
        raise ValueError("set `use_vllm` too")
    return _use_vllm(given.get("use_vllm"), given)


def _vllm_server(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert the host or the port of TRL's server."""
    if given.get("vllm_mode") == "server" and given.get("use_vllm"):
        return _use_vllm(True, given)
    if value not in ("0.0.0.0", 8000) and given.get("use_vllm") is not False:
        raise ValueError("a server is used with `use_vllm: true` and `vllm_mode: server`; set them beside it")
    return {}


def _bf16(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Choose the compute precision: bfloat16, or the precision of the weights if `bf16` is false.

    If the weights are bfloat16, return nothing: the field that asks for them sets the precision. docs/migrate.md has a
    table.
    """
    if value:
        return {"dtype": "bfloat16"}
    weights = _weights(given)
    if weights == "auto":
        raise ValueError(f"with it TRL computes in the checkpoint's precision; {NAME_DTYPE} instead of `auto`")
    return {} if weights == "bfloat16" else {"dtype": "float32"}


NAME_DTYPE = "name `bfloat16` or `float32` as `dtype`"


def _weights(given: Mapping[str, Any]) -> Any:
    """Return the precision of TRL's weights, `auto` for the checkpoint's, or None if it is left out."""
    kwargs = given.get("model_init_kwargs")
    if isinstance(kwargs, dict) and "dtype" in kwargs:
        return kwargs["dtype"] or "auto"
    return given.get("dtype") or given.get("torch_dtype")


def _dtype(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert the precision of TRL's weights. If `bf16` is false, TRL also computes in it."""
    if value is None:
        return {}
    if value == "float16":
        raise ValueError(f"float16 is not in this project; {NAME_DTYPE}")
    if value == "auto":
        return {} if given.get("bf16") is False else {"dtype": "bfloat16"}
    return {"dtype": value}


def _generation_batch_size(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert the completions of a window to micro-steps of `per_device_train_batch_size` on every process."""
    if given.get("steps_per_generation") is not None:
        raise ValueError("`steps_per_generation` is given as well; keep that alone")
    if given.get("prompts_per_step") or given.get("train.prompts_per_step"):
        raise ValueError("with `prompts_per_step`, give `steps_per_generation` instead")
    per_device = given.get("per_device_train_batch_size") or TRL_PER_DEVICE_BATCH_SIZE
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if not isinstance(value, int) or not isinstance(per_device, int) or value % (per_device * processes) or value < 1:
        raise ValueError(
            f"it should be a multiple of `per_device_train_batch_size` {per_device} × {processes} processes; "
            "or give `steps_per_generation`, their quotient"
        )
    return {"steps_per_generation": value // (per_device * processes)}


OPTIMIZERS = {
    "adamw_torch": "adamw_torch", "adamw_torch_fused": "adamw_torch", "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit", "adafactor": "adafactor",
}  # fmt: skip
"""Optimizers of transformers, and their names here. A fused AdamW computes the same updates."""


def _optim(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    if value not in OPTIMIZERS:
        raise ValueError(f"the optimizers are {', '.join(sorted(set(OPTIMIZERS.values())))}")
    return {"optim": OPTIMIZERS[value]}


INIT_KWARGS = {
    "dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation",
    "revision": "model_revision", "trust_remote_code": "trust_remote_code",
}  # fmt: skip
"""Arguments of `from_pretrained` that are settings here."""


QLORA = (
    "write `load_in_4bit: true` for QLoRA, with `bnb_4bit_quant_type` and `use_bnb_nested_quant` (docs/memory.md); "
    "other quantizations are not supported"
)
"""Advice in place of a `quantization_config`."""


def _model_init_kwargs(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert arguments of `from_pretrained`."""
    if isinstance(value, dict) and value.get("quantization_config"):
        raise ValueError(f"`quantization_config`: {QLORA}")
    if not isinstance(value, dict) or value.keys() - INIT_KWARGS:
        raise ValueError(
            f"only {', '.join(INIT_KWARGS)} can be given; they are `model.dtype`, `model.attn_implementation`, "
            "`model.model_revision` and `model.trust_remote_code`"
        )
    settings = {
        INIT_KWARGS[name]: item
        for name, item in value.items()
        if item is not None and not (name == "torch_dtype" and "dtype" in value)
    }
    computes_in_weights = given.get("bf16") is False
    if computes_in_weights and value.get("torch_dtype") not in (None, "float32"):
        raise ValueError("TRL does not read `torch_dtype` here, and loads float32; write `dtype`")
    if settings.get("dtype") == "float32" and not computes_in_weights:
        del settings["dtype"]  # weights that are trained are always float32, and the default decides the rest
    return settings | (_dtype(settings["dtype"], given) if "dtype" in settings else {})


def _vlm_r1_paths(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert VLM-R1's `data_file_paths` and `image_folders`, one or several, separated by colons."""
    paths = [given.get(name) for name in ("data_file_paths", "image_folders")]
    files, folders = (path.split(":") if isinstance(path, str) else [] for path in paths)
    if len(files) > 1 and len(folders) in (0, len(files)):
        roots = [{"image_root": folder} for folder in folders] or [{} for _ in files]
        return {"dataset_name": [{"name": name, **root} for name, root in zip(files, roots, strict=True)]}
    if len(files) > 1 or len(folders) > 1 or not isinstance(value, str):
        raise ValueError("`data_file_paths` and `image_folders` should have as many paths, separated by colons")
    return {name: found[0] for name, found in (("dataset_name", files), ("image_root", folders)) if found}


MIXTURE_FIELDS = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")


def _datasets(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert the entries of TRL's DatasetMixtureConfig. Each row of each entry is drawn once per epoch, as in TRL."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("it should be a list of mappings with `path`, `name` and `split`")
    return {"dataset_name": [_dataset(entry) for entry in value]}


def _dataset(entry: dict[str, Any]) -> FoundSettings:
    """Convert an entry. An entry of the builder json or parquet gets the name of its file."""
    filled = {name: item for name, item in entry.items() if item is not None}
    if unknown := sorted(filled.keys() - set(MIXTURE_FIELDS)):
        raise ValueError(f"an entry has {', '.join(unknown)}; TRL's fields are {', '.join(MIXTURE_FIELDS)}")
    if "fraction" in filled:
        raise ValueError("`fraction` leaves rows out in TRL; write `weight` in a list `dataset_name`, a share of draws")
    if "columns" in filled:
        raise ValueError("`columns` selects columns in TRL; write `ignore_columns` in a list `dataset_name`")
    path, files = filled.get("path"), filled.get("data_files")
    is_one_file = path in ("json", "parquet") and isinstance(files, str)
    if "data_dir" in filled or not (is_one_file or files is None) or not isinstance(path, str):
        raise ValueError("an entry has one `path`, or json or parquet with one file in `data_files`")
    if is_one_file:
        return {"name": files} | ({} if filled.get("split", "train") == "train" else {"split": filled["split"]})
    own = {"dataset_config": filled.get("name"), "split": filled.get("split", "train")}
    return {"name": path} | {name: item for name, item in own.items() if item is not None}


def _tool_rounds(value: Any, given: Mapping[str, Any]) -> FoundSettings:
    """Convert rounds of tools to turns. The turn after the last round is one more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("it should be a number of rounds above 0; leave it out for the default of `rollout.max_turns`")
    return {"max_turns": value + 1}


def _neutral(reason: str) -> Callable[[Any, Mapping[str, Any]], FoundSettings]:
    """Build the conversion of a field that must be false. `reason` is the error message."""

    def convert(value: Any, given: Mapping[str, Any]) -> FoundSettings:
        if value:
            raise ValueError(reason)
        return {}

    return convert


CONVERTED: dict[str, Callable[[Any, Mapping[str, Any]], FoundSettings]] = {
    "bf16": _bf16,
    "dtype": _dtype,
    "generation_batch_size": _generation_batch_size,
    "model_init_kwargs": _model_init_kwargs,
    "optim": _optim,
    "max_steps": lambda value, given: {"max_steps": None if value == -1 else value},
    "scale_rewards": _scale_rewards,
    "reward_funcs": _reward_funcs,
    "lora_target_modules": lambda value, given: {
        "lora_target_modules": "all-linear" if value == ["all-linear"] else value
    },
    "eval_strategy": _eval_strategy,
    "save_strategy": _save_strategy,
    "metric_for_best_model": lambda value, given: {"metric_for_best_model": str(value).removeprefix("eval_")},
    "resume_from_checkpoint": lambda value, given: {
        "resume_from_checkpoint": "auto" if value is True else value or None
    },
    "use_vllm": _use_vllm,
    "vllm_mode": _vllm_mode,
    "vllm_server_host": _vllm_server,
    "vllm_server_port": _vllm_server,
    "vllm_importance_sampling_clip_max": lambda value, given: {"vllm_importance_sampling_clip_max": value},
    "max_tool_calling_iterations": _tool_rounds,
    "vllm_importance_sampling_cap": lambda value, given: {"vllm_importance_sampling_clip_max": value},
}

FROM_VLM_R1: dict[str, Callable[[Any, Mapping[str, Any]], FoundSettings]] = {
    "data_file_paths": _vlm_r1_paths,
    "image_folders": _vlm_r1_paths,
    "freeze_vision_modules": lambda value, given: {"freeze_vision_tower": value},
}
"""Settings that VLM-R1 adds to TRL's."""

FROM_MIXTURES: dict[str, Callable[[Any, Mapping[str, Any]], FoundSettings]] = {
    "datasets": _datasets,
    "streaming": _neutral("rows are read by their number; download the data, or write them to a file"),
    "test_split_size": _neutral("write held-out rows to a file of their own, and name it in `eval_dataset_name`"),
}
"""Fields of TRL's DatasetMixtureConfig."""

NULL_IS_OFF = {"vllm_importance_sampling_clip_max": 0}
"""Fields that null turns off, as in TRL, with the value for off. For all others, null means the default."""

OLD_NAMES = {"warmup_ratio": "warmup_steps", "torch_dtype": "dtype", "evaluation_strategy": "eval_strategy"}
"""Fields of earlier versions and their present names. A `warmup_steps` below 1 is a ratio."""


class NotHere(ValueError):
    """A field of `NOT_HERE`, with a value that has no effect here."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; leave it out")
        self.reason = reason


def translate(name: str, value: Any, given: Mapping[str, Any]) -> FoundSettings | None:
    """Convert TRL's field `name` with `value` to settings by leaf name. Returns None if TRL has no such field.

    Also converts the fields of VLM-R1 and of TRL's mixtures. `given` holds all fields that are set. Raises ValueError
    with the reason if the value is not supported here.
    """
    name = OLD_NAMES.get(name, name)
    if name in SAME:
        return {name: value}
    if converts := (CONVERTED | FROM_VLM_R1 | FROM_MIXTURES).get(name):
        value = NULL_IS_OFF.get(name) if value is None else value
        return {} if value is None else converts(value, given)
    for reason, fields in NOT_HERE.items():
        if name in fields:
            neutral = fields[name]
            if value is None or value in (neutral if isinstance(neutral, tuple) else (neutral,)):
                return {}
            raise NotHere(reason)
    return None
