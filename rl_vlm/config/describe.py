"""Describe a run: the resolved settings, the batch sizes, and the help text of every setting."""

from collections.abc import Iterable, Sequence
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rl_vlm.config import yaml_text
from rl_vlm.config.batches import BatchSizes
from rl_vlm.config.schema import SECTIONS, DataSource, MemoryConfig, RewardSpec, RunConfig
from rl_vlm.config.secrets import starred
from rl_vlm.config.sections import Section

REWARD_ENTRY = "an entry of rewards.reward_funcs"
DATA_ENTRY = "an entry of data.dataset_name"
INDENT = " " * 6
WORDS = {bool: ["true", "false"], int: ["whole number"], float: ["number"], str: ["text"]}
"""Names of types in the text. Values of other types are entries with their own settings."""
HELP_SECTIONS: dict[str, type[Section]] = {**SECTIONS, DATA_ENTRY: DataSource, REWARD_ENTRY: RewardSpec}


def to_yaml(config: RunConfig) -> str:
    """Write every setting with its value as YAML. `load_config` reads it back to an equal config.

    Secrets are starred out, so `load_config` asks for them.
    """
    return yaml_text.dump(starred(config.model_dump(mode="json")))


def describe(config: RunConfig, sizes: BatchSizes | None = None) -> str:
    """Return the resolved settings as YAML.

    Before them, comments list the settings that differ from the defaults. After them, comments describe the batches of
    `sizes`.
    """
    comments = [] if sizes is None else [f"# {sentence}\n" for sentence in _batch_sentences(config, sizes)]
    return _differences(config) + to_yaml(config) + "".join(comments)


def _differences(config: RunConfig) -> str:
    """Return a comment per setting that differs from its default, and a heading."""
    changed = starred(config.model_dump(mode="json", exclude_defaults=True))
    lines = [
        f"#   {section}.{name}: {yaml_text.one_line(value)}\n"
        for section, settings in changed.items()
        for name, value in settings.items()
    ]
    return "".join(["# Settings that differ from the defaults:\n", *lines, "# All settings:\n"])


def settings_help(sections: Iterable[str] = HELP_SECTIONS) -> str:
    """Return the help text of every setting in some sections: name, type, default and docstring."""
    lines = []
    for section in sections:
        lines.append(f"{section}:")
        for name, field in HELP_SECTIONS[section].model_fields.items():
            lines.append(_head(name, field))
            lines += [f"{INDENT}{line.strip()}" for line in (field.description or "").splitlines()]
        lines.append("")
    return "\n".join(lines)


def short_help(names: Iterable[str]) -> str:
    """Return the help text of some settings by section, with the first sentence of each docstring."""
    lines, wanted = [], set(names)
    for section, model in SECTIONS.items():
        fields = {name: field for name, field in model.model_fields.items() if name in wanted}
        lines += [f"{section}:"] if fields else []
        for name, field in fields.items():
            sentence = " ".join((field.description or "").split()).split(". ")[0].rstrip(".")
            lines += [_head(name, field), *wrap(f"{sentence}.", 118, initial_indent=INDENT, subsequent_indent=INDENT)]
    return "\n".join(lines)


def _batch_sentences(config: RunConfig, sizes: BatchSizes) -> list[str]:
    processes = f"{sizes.prompts_per_rank_step} prompts on each of {sizes.world_size} processes"
    train, steps_per_window = config.train, sizes.steps_per_window * sizes.num_iterations
    if train.max_steps is not None:
        length = f"{train.max_steps} optimizer steps (max_steps)"
    else:
        length = (
            f"{train.num_train_epochs:g} × the number of rows / {sizes.prompts_per_window}, rounded up, "
            f"× {steps_per_window} optimizer steps (num_train_epochs)"
        )
    return [
        f"Optimizer step: {sizes.prompts_per_step} prompts × {sizes.num_generations} = {sizes.completions_per_step} "
        f"completions, {processes if sizes.world_size > 1 else 'all on one process'}.",
        f"Generation window: {sizes.steps_per_window} × {sizes.prompts_per_step} = {sizes.prompts_per_window} prompts "
        f"sampled at once, for {sizes.num_iterations} × {sizes.steps_per_window} = {steps_per_window} optimizer steps.",
        f"Run: {length}.",
        f"Micro-batches: {micro_batches(config.memory)}; their number changes no result.",
    ]


def micro_batches(memory: MemoryConfig) -> str:
    """Describe the size of micro-batches."""
    tokens = memory.micro_batch_tokens
    return "what fits on the device, by the memory plan" if tokens == "auto" else f"up to {tokens} language tokens"


def _head(name: str, field: FieldInfo) -> str:
    default = ", required" if field.is_required() else f" = {yaml_text.one_line(field.default)}"
    return f"  {name}: {_type(field)}{default}"


def _type(field: FieldInfo) -> str:
    """Return the values that a setting takes, in words. That it may be null is left to its default."""
    return _either(_choices(field.annotation))


def _choices(annotation: Any) -> list[str]:
    """Return the alternatives of a type, in words. Values of a Literal stand for themselves."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _choices(arguments[0])
    if origin is Literal:
        return [yaml_text.one_line(value) for value in arguments]
    if origin in (Union, UnionType):
        return [choice for each in arguments if each is not NoneType for choice in _choices(each)]
    if origin is list:
        return [f"list of {_either([f'{choice}s' for choice in _choices(arguments[0])])}"]
    if origin is dict:
        values = arguments[1]
        return ["mapping" if values is Any else f"mapping to {_either([f'{choice}s' for choice in _choices(values)])}"]
    return WORDS.get(annotation, ["mapping"])


def _either(choices: Sequence[str]) -> str:
    """Join alternatives as `a, b or c`."""
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
