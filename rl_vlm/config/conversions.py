"""Conversions of values of VLM-R1, EasyR1, verl and ms-swift, for the rows of `elsewhere.py`.

A conversion gets the value and all settings that are given, by their names there, and returns settings by leaf name, as
the conversions of `trl_fields.py` do. It raises ValueError with the reason if there is no equivalent. A name such as
`--sharding` is an option of `rl-vlm launch`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_vlm.config.engines import ENGINES
from rl_vlm.config.trl_fields import TRL_PER_DEVICE_BATCH_SIZE, FoundSettings

Given = Mapping[str, Any]
Convert = Callable[[Any, Given], FoundSettings]
PROCESSES = "number of processes"
"""The key of `given` with the number of processes, if the script says it."""
NOTE = "note"
"""The key of a result with the part of a value that was not converted, and the reason."""


def value_of(given: Given, *ends: str, default: Any = None) -> Any:
    """Return the first value whose key is, or ends with, one of `ends`. Null counts as not given."""
    found = (
        given[key]
        for end in ends
        for key in given
        if (key == end or key.endswith(f".{end}")) and given[key] is not None
    )
    return next(found, default)


def count(value: Any, name: str) -> int:
    """Return a whole number above 0. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` is {value!r}, and should be a whole number above 0")
    return value


# Batches


def completions_to_prompts(value: Any, given: Given) -> FoundSettings:
    """Convert TRL's batch, in completions per process and micro-step, to prompts of a step.

    Without a number of processes, keep TRL's settings, which mean the same here.
    """
    given = {name: item for name, item in given.items() if item is not None}
    per_device = count(
        given.get("per_device_train_batch_size", TRL_PER_DEVICE_BATCH_SIZE), "per_device_train_batch_size"
    )
    accumulation = count(given.get("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
    processes = given.get(PROCESSES)
    window = _micro_steps_per_window(given, per_device, accumulation)
    if processes is None:
        micro_steps = {} if window == accumulation else {"steps_per_generation": window}
        return {
            "per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation, **micro_steps
        }  # fmt: skip
    group = count(given.get("num_generations", 8), "num_generations")
    completions = per_device * accumulation * processes
    if completions % group or window % accumulation:
        raise ValueError(
            f"{per_device} completions × {accumulation} micro-steps × {processes} processes are not whole groups of "
            f"{group}; choose `train.prompts_per_step`"
        )
    steps = window // accumulation
    return {"prompts_per_step": completions // group, **({} if steps == 1 else {"steps_per_generation": steps})}


def _micro_steps_per_window(given: Given, per_device: int, accumulation: int) -> int:
    """Return the micro-steps of a generation window of TRL or ms-swift."""
    if "steps_per_generation" in given:
        return count(given["steps_per_generation"], "steps_per_generation")
    if "generation_batch_size" in given:
        micro_step = per_device * given.get(PROCESSES, 1)
        if count(given["generation_batch_size"], "generation_batch_size") % micro_step:
            raise ValueError(f"`generation_batch_size` is no multiple of the {micro_step} completions of a micro-step")
        return given["generation_batch_size"] // micro_step
    return accumulation


def prompts_of_window_and_step(value: Any, given: Given) -> FoundSettings:
    """Convert the prompts of a rollout, and of an optimizer step, of EasyR1 and verl."""
    step, steps = _step_and_steps(given)
    return {"prompts_per_step": step, **({} if steps == 1 else {"steps_per_generation": steps})}


def _step_and_steps(given: Given) -> tuple[int, int]:
    """Return the prompts of an optimizer step, and the optimizer steps of one pass over a rollout."""
    window = value_of(given, "data.train_batch_size", "data.rollout_batch_size")
    step = value_of(given, "actor.ppo_mini_batch_size", "actor.global_batch_size", default=window)
    if window is None:
        raise ValueError("the prompts of a rollout are not set; choose `train.prompts_per_step`")
    window, step = count(window, "train_batch_size"), count(step, "ppo_mini_batch_size")
    if window % step:
        raise ValueError(
            f"a rollout of {window} prompts is not a multiple of the step's {step}; choose `train.prompts_per_step`"
        )
    return step, window // step


def rollouts_to_steps(leaf: str, off: int | None = 0) -> Convert:
    """Build the conversion of a number of rollouts to optimizer steps. `off` replaces -1 and 0."""

    def convert(value: Any, given: Given) -> FoundSettings:
        if value is None or value in (-1, 0):
            return {leaf: off}
        _, steps = _step_and_steps(given)
        passes = value_of(given, "actor.ppo_epochs", default=1)
        return {leaf: count(value, leaf) * steps * count(passes, "ppo_epochs")}

    return convert


# The loss


def kl_in_loss(value: Any, given: Given) -> FoundSettings:
    """Convert the KL term of EasyR1 and verl: only a term of the loss has an equivalent."""
    in_loss = value_of(given, "actor.use_kl_loss", "algorithm.use_kl_loss", default=False)
    if value_of(given, "algorithm.disable_kl", default=False) or not value:
        return {}
    if not in_loss and value_of(given, "actor.kl_loss_coef") is None:  # EasyR1 has the term in one of both places
        return kl_in_reward(value, given)
    if not in_loss:
        return {}
    kind = value_of(given, "actor.kl_loss_type", "algorithm.kl_penalty", default="low_var_kl")
    if kind not in ("low_var_kl", "k3"):
        raise ValueError(f"the KL term is estimated by k3 (low_var_kl), not by {kind}; write `algorithm.beta` for that")
    return {"beta": value, "use_bias_correction_kl": False}


def kl_in_reward(value: Any, given: Given) -> FoundSettings:
    """Refuse a KL term in the reward."""
    if value:
        raise ValueError("there is no KL term in the reward; `algorithm.beta` is the weight of one in the loss")
    return {}


STAND_INS = {"sglang": "vllm"}
"""Engines that do not exist here, and the one that samples instead."""


def engine(value: Any, given: Given) -> FoundSettings:
    """Convert the engine of EasyR1 and verl. They do not correct for its log-probs, and vLLM stands in for SGLang."""
    name = STAND_INS.get(value, value)
    if name not in ENGINES:
        raise ValueError(f"the engines are {', '.join(ENGINES)}")
    uncorrected = {"vllm_importance_sampling_correction": False} if ENGINES[name].has_own_weights else {}
    return {"engine": name, **uncorrected}


def clip_range(value: Any, given: Given) -> FoundSettings:
    """Convert the clip range of EasyR1 and verl. `clip_ratio_low` and `clip_ratio_high` replace `clip_ratio`."""
    both = value_of(given, "actor.clip_ratio", default=0.2)
    low, high = (value_of(given, f"actor.clip_ratio_{side}", f"algorithm.clip_ratio_{side}", "actor.clip_ratio",
                          default=both) for side in ("low", "high"))  # fmt: skip
    return {"epsilon": low, **({} if low == high else {"epsilon_high": high})}


def turns(value: Any, given: Given) -> FoundSettings:
    """Convert verl's limit of turns of the model, which counts only with `multi_turn.enable`."""
    is_read = value is not None and value_of(given, "multi_turn.enable", default=False)
    return {"max_turns": count(value, "max_assistant_turns")} if is_read else {}


def with_gigpo(converts: Convert, otherwise: str | None = None) -> Convert:
    """Build the conversion of a setting of verl-agent that `adv_estimator: gigpo` reads.

    With another estimator the setting is left out. If there is a reason `otherwise`, it must be 1 then.
    """

    def convert(value: Any, given: Given) -> FoundSettings:
        if value_of(given, "adv_estimator") == "gigpo":
            return converts(value, given)
        if otherwise is not None and value not in (None, 1):
            raise ValueError(otherwise)
        return {}

    return convert


def choice_of(names: Mapping[Any, FoundSettings], reason: str) -> Convert:
    """Build the conversion of a setting with few values. `reason` is the error about any other."""

    def convert(value: Any, given: Given) -> FoundSettings:
        if isinstance(value, list | dict) or value not in names:
            raise ValueError(reason)
        return dict(names[value])

    return convert


# Data


def column(here: str, *recognised: str) -> Convert:
    """Build the conversion of the name of a column. `recognised` are names that need no setting."""
    return lambda value, given: {} if value in recognised else {"columns": {here: value}}


def swift_data(leaf: str) -> Convert:
    """Build the conversion of ms-swift's datasets, `name:subset#number`."""

    def convert(value: Any, given: Given) -> FoundSettings:
        written = [str(name) for name in (value if isinstance(value, list) else [value])]
        names = [name.partition("#")[0] for name in written]
        note = {} if names == written else {NOTE: "`#` takes some rows; write these rows to a file, and name it"}
        entries = [
            {"name": name} if file or not subset else {"name": name, "dataset_config": subset}
            for text in names
            for file in [os.path.splitext(text)[1] in (".json", ".jsonl", ".parquet", ".csv")]
            for name, _, subset in [(text, "", "") if file else text.partition(":")]
        ]
        plain = [entry["name"] if entry.keys() == {"name"} else entry for entry in entries]
        return {leaf: plain[0] if plain == [names[0]] else plain, **note}

    return convert


def swift_system(value: Any, given: Given) -> FoundSettings:
    """Convert a system message, which ms-swift also reads from a file."""
    if str(value).endswith(".txt"):
        raise ValueError("write the text of the file into `data.system_prompt`")
    return {"system_prompt": value}


# Rewards


def function_in_file(value: Any, given: Given) -> FoundSettings:
    """Convert the reward function of verl, a file and a name in it, with its arguments."""
    path, name = (value_of(given, f"custom_reward_function.{part}") for part in ("path", "name"))
    if path is None:
        raise ValueError("without `custom_reward_function.path` it names no file; write `rewards.reward_funcs`")
    arguments = {
        key.partition("reward_kwargs.")[2]: item for key, item in given.items() if ".reward_kwargs." in key
    }  # fmt: skip
    return {"reward_funcs": _with_arguments(f"{path}:{name or 'compute_score'}", arguments)}


def easyr1_function(value: Any, given: Given) -> FoundSettings:
    """Convert the reward function of EasyR1, whose default name in a file is `main`."""
    arguments = {
        key.rpartition("_function_kwargs.")[2]: item for key, item in given.items() if "_function_kwargs." in key
    }
    return {"reward_funcs": _with_arguments(value if ":" in str(value) else f"{value}:main", arguments)}


def _with_arguments(function: str, arguments: FoundSettings) -> Any:
    return [{"function": function, "kwargs": arguments}] if arguments else function


TAGS = {"function": "format_tags", "kwargs": {"tags": ["think", "answer"]}}
VLM_R1_METHODS = {"mcq": "choice", "math": "maths", "yes_no": "yes_no"}
"""Values of VLM-R1's `reward_method`, and functions here."""


def vlm_r1_rewards(value: Any, given: Given) -> FoundSettings:
    """Convert the names of VLM-R1's own reward functions."""
    functions: list[Any] = []
    notes = []
    for name in value if isinstance(value, list) else [value]:
        method = str(given.get("reward_method"))
        if name == "format":
            functions.append(TAGS)
        elif name == "accuracy" and method in VLM_R1_METHODS:
            functions.append(VLM_R1_METHODS[method])
        elif name == "accuracy" and given.get("task_type") == "rec":
            functions.append("iou")
        else:
            notes.append(
                f"`{name}` is a function of VLM-R1 that judges each kind of answer in its own way; name the function "
                "for yours in `rewards.reward_funcs`, such as choice, numeric, maths or iou"
            )
    return _functions(functions, notes)


def _functions(functions: list[Any], notes: list[str]) -> FoundSettings:
    return ({"reward_funcs": functions} if functions else {}) | ({NOTE: "; ".join(notes)} if notes else {})


SWIFT_REWARDS: dict[str, Any] = {"accuracy": "maths", "format": TAGS}
"""ms-swift's own functions that need no settings, and functions here."""
OTHERS_OF_SWIFT = {"cosine": "cosine_length", "repetition": "repetition", "soft_overlong": "overlong"}
"""ms-swift's own functions with settings, and the closest functions here."""


def swift_rewards(value: Any, given: Given) -> FoundSettings:
    """Convert the names of ms-swift's functions and of functions in its plugin."""
    plugin, notes = given.get("external_plugins"), []
    functions: list[Any] = []
    for name in value if isinstance(value, list) else [value]:
        if name in SWIFT_REWARDS:
            functions.append(SWIFT_REWARDS[name])
        elif name in OTHERS_OF_SWIFT:
            notes.append(
                f"`{name}` has settings of its own; `{OTHERS_OF_SWIFT[name]}` is the closest function "
                f"(`rl-vlm rewards show {OTHERS_OF_SWIFT[name]}`)"
            )
        elif isinstance(plugin, str):
            functions.append(f"{plugin}:{name}")
            notes.append(f"write the class that {plugin} registers as `{name}` into `rewards.reward_funcs`")
        else:
            notes.append(f"there is no function `{name}` here; write `rewards.reward_funcs: file.py:function`")
    return _functions(functions, notes)


# The model, its training, and the launch


def vlm_r1_data(value: Any, given: Given) -> FoundSettings:
    """Convert `dataset_name`, which VLM-R1 ignores if `data_file_paths` are given."""
    if given.get("data_file_paths"):
        return {}
    if str(value).endswith((".yaml", ".yml")):
        raise ValueError("name the files that it lists in `data.dataset_name`, as a list")
    return {"dataset_name": value}


def attention(value: Any, given: Given) -> FoundSettings:
    """Convert the attention. FlashAttention computes the same function as the default here."""
    return {} if str(value).startswith("flash") else {"attn_implementation": value}


def adapter(value: Any, given: Given) -> FoundSettings:
    """Convert the rank of EasyR1's and verl's adapter. Rank 0 means no adapter."""
    return {"use_peft": True, "lora_r": value} if value else {}


def with_adapter(leaf: str) -> Convert:
    """Build the conversion of a setting that EasyR1 and verl read only with an adapter."""
    return lambda value, given: {leaf: value} if value_of(given, "model.lora_rank", "lora.rank", default=0) else {}


def deepspeed(value: Any, given: Given) -> FoundSettings:
    """Convert the name of a DeepSpeed configuration to an option of `rl-vlm launch`."""
    name = os.path.basename(str(value)).removesuffix(".json").replace("-", "_").removeprefix("ds_")
    if not re.fullmatch(r"zero(?:2|3|3_offload)", name):
        raise ValueError("name the file in a file of accelerate, with `deepspeed_config_file` (docs/distributed.md)")
    return {"--sharding": name}


OFFLOADS = ("param_offload", "optimizer_offload", "offload_params", "offload_optimizer")


def sharded(value: Any, given: Given) -> FoundSettings:
    """Choose the sharding for EasyR1's or verl's FSDP. It offloads states to host memory if a setting asks for it."""
    offloads = any(item is True and key.endswith(OFFLOADS) and ".ref." not in key for key, item in given.items())
    return {"--sharding": "zero3_offload" if offloads else "fsdp2"}


def trackers(value: Any, given: Given) -> FoundSettings:
    """Convert the list of trackers. Lines in the terminal and in a file are always written."""
    names = value if isinstance(value, list) else [value]
    kept = [name for name in names if name not in ("console", "file", "none")]
    return {"report_to": kept} if kept else {}


def resumed(value: Any, given: Given) -> FoundSettings:
    """Convert verl's `resume_mode`."""
    return {} if value == "disable" else {"resume_from_checkpoint": "auto"}


def warmup(value: Any, given: Given) -> FoundSettings:
    """Convert EasyR1's and verl's warm-up, a fraction or a number of rollouts. -1 means not given."""
    if not isinstance(value, int | float) or value <= 0:
        return {}
    return {"warmup_steps": value if value < 1 else rollouts_to_steps("warmup_steps")(value, given)["warmup_steps"]}


def schedule(value: Any, given: Given) -> FoundSettings:
    """Convert the schedule of the learning rate. A constant one of EasyR1 and verl also warms up."""
    warms_up = value_of(given, "optim.lr_warmup_ratio", "optim.lr_warmup_steps", default=0)
    is_warm = isinstance(warms_up, int | float) and warms_up > 0
    return {"lr_scheduler_type": "constant_with_warmup" if value == "constant" and is_warm else value}


def tuner(value: Any, given: Given) -> FoundSettings:
    """Convert ms-swift's kind of training."""
    if value not in ("lora", "full"):
        raise ValueError("the kinds of training are lora and full")
    return {"use_peft": value == "lora"}


def frozen_tower(value: Any, given: Given) -> FoundSettings:
    """Convert `freeze_vit`. An adapter of ms-swift is then on the language model, which is the default here."""
    is_full = "full" in (given.get("train_type"), given.get("tuner_type"))
    return {"freeze_vision_tower": value} if is_full else {}
