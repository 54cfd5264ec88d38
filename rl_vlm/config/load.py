"""The settings of a run, from a YAML file and then `key=value` overrides. All problems are reported at once.

A key is `section.leaf`, or a leaf alone, which is unique. A leaf alone is read as TRL reads it: `trl_fields` converts
TRL's names. A null value stands for the default. As in TRL, `use_vllm: false` disables the settings of vLLM, so that a
file can keep them for another run.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_vlm.config import trl_fields, yaml_text
from rl_vlm.config.schema import SECTIONS, SETTINGS, RewardSpec, RunConfig
from rl_vlm.errors import ConfigError

FULL_NAMES = {setting.split(".")[1]: setting for setting in SETTINGS}
KNOWN_KEYS = FULL_NAMES | {section: section for section in SECTIONS}


DISABLED_BY_USE_VLLM = ("vllm.", "algorithm.vllm_")
"""Prefixes of the settings that `use_vllm: false` disables."""


def load_config(path: str | Path, overrides: Iterable[str] = (), fixed: Mapping[str, Any] = {}) -> RunConfig:
    """Load the YAML file at `path` with `overrides` such as `train.max_steps=10` or `max_steps=10`.

    `fixed` holds settings by full name that take precedence over both.
    Raises ConfigError with one line per problem: source, key, value, and what would be valid.
    """
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    disabled: set[str] = set()
    for source, keys in ((str(path), _read_file(path)), ("command line", _parse_overrides(overrides))):
        found, refused = _resolve(keys)
        settings |= found
        disabled -= found.keys()
        if keys.get("use_vllm") is False:
            disabled = {name for name in settings if name.startswith(DISABLED_BY_USE_VLLM)}
        sources |= dict.fromkeys(found, source)
        problems += [f"{source}: {problem}" for problem in refused]
    settings |= fixed
    if settings.get("rollout.engine") in (None, "hf"):
        settings = {name: value for name, value in settings.items() if name not in disabled}

    try:
        config = RunConfig.model_validate(_nest(settings))
    except ValidationError as error:
        problems += _validation_problems(error, sources, str(path))
    else:
        if not problems:
            return config
    raise ConfigError("\n".join(problems))


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError if `config` lacks a setting that only training needs, or has one that training cannot use."""
    missing = []
    if config.data.dataset_name is None:
        missing.append("`data.dataset_name`, the training data, is not set")
    if not config.rewards.reward_funcs:
        missing.append("`rewards.reward_funcs` is empty: training needs at least one reward function")
    if config.rollout.num_generations < 2:
        missing.append("`rollout.num_generations` is 1: an advantage compares at least 2 completions of one prompt")
    rollout = config.rollout
    if rollout.engine != "hf" and (rollout.top_p < 1 or rollout.top_k or rollout.min_p):
        missing.append(
            f"`rollout.engine` is {rollout.engine}: with `top_p`, `top_k` or `min_p` vLLM returns log-probs of what "
            "these leave, and training needs them as they were before; unset them, or use the engine hf"
        )
    if config.evaluation.endpoint_url is not None:
        missing.append("`evaluation.endpoint_url` is for `rl-vlm eval`: a run evaluates what it trains; leave it out")
    if missing:
        raise ConfigError("\n".join(missing))


def check_evaluable(config: RunConfig) -> None:
    """Raise ConfigError if `config` lacks what an evaluation needs."""
    missing = []
    if config.data.eval_dataset_name is None:
        missing.append("`data.eval_dataset_name`, the held-out data, is not set")
    if not config.rewards.reward_funcs:
        missing.append("`rewards.reward_funcs` is empty: evaluation needs at least one reward function")
    if missing:
        raise ConfigError("\n".join(missing))


def _read_file(path: str | Path) -> dict[str, Any]:
    """Read the file's settings by key as written, those in sections as `section.leaf`."""
    try:
        content = yaml_text.parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    return _flatten(str(path), {} if content is None else content)


def _flatten(source: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected `key: value` settings, found {content!r}")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key not in SECTIONS:
            flat[str(key)] = value
        elif isinstance(value, dict):
            flat |= {f"{key}.{leaf}": leaf_value for leaf, leaf_value in value.items()}
        elif value is not None:
            raise ConfigError(f"{source}: `{key}` is a section and holds `key: value` settings, found {value!r}")
    return flat


def _parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    keys = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"command line: `{override}` is not of the form key=value")
        try:
            keys[key] = yaml_text.parse(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: the value of `{override}` is not YAML; quote it: {error}") from error
    return keys


def _resolve(keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return values by full setting name, and a line for each key that is unknown, refused or contradicts another."""
    settings: dict[str, Any] = {}
    given_by: dict[str, str] = {}
    problems: list[str] = []
    for key, value in keys.items():
        try:
            found = _settings_of(key, value, keys)
        except ValueError as refusal:
            problems.append(f"`{key}` is {value!r}: {refusal}")
            continue
        if found is None:
            problems.append(_unknown(key, KNOWN_KEYS))
            continue
        for setting, setting_value in found.items():
            if setting in settings and settings[setting] != setting_value:
                problems.append(
                    f"`{given_by[setting]}` and `{key}` both set `{setting}`, "
                    f"to {settings[setting]!r} and {setting_value!r}; keep one of them"
                )
            settings[setting], given_by[setting] = setting_value, key
    return settings, problems


def _settings_of(key: str, value: Any, keys: Mapping[str, Any]) -> dict[str, Any] | None:
    if key in SETTINGS:
        return {key: value}
    if key in FULL_NAMES and value is None and key not in trl_fields.NULL_IS_OFF:
        return {FULL_NAMES[key]: None}
    translated = trl_fields.translate(key, value, keys)
    if translated is not None:
        return {FULL_NAMES[leaf]: leaf_value for leaf, leaf_value in translated.items()}
    return {FULL_NAMES[key]: value} if key in FULL_NAMES else None


def _nest(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting, value in settings.items():
        section, leaf = setting.split(".")
        if value is not None:
            nested[section][leaf] = value
    return nested


def _unknown(key: str, known: Mapping[str, str]) -> str:
    """Return a message with the closest valid key. `known` maps last parts of keys to full names."""
    closest = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
    hint = f"the closest is `{known[closest[0]]}`" if closest else "see `rl-vlm train --help`"
    return f"unknown setting `{key}`; {hint}"


def _validation_problems(error: ValidationError, sources: Mapping[str, str], path: str) -> list[str]:
    """Return one line per setting; pydantic reports each branch of a union separately."""
    by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        if detail["loc"][-1:] != ("str",) or not isinstance(detail["input"], dict):  # a mapping is not meant as a name
            by_place.setdefault(_place(detail["loc"]), []).append(detail)
    problems = []
    for place, details in by_place.items():
        first, key = details[0], ".".join(map(str, place))
        source = sources.get(".".join(map(str, place[:2])), path)
        if not place:
            problems += [f"{source}: {line}" for line in _reason(first).splitlines()]
        elif first["type"] == "missing":
            problems.append(f"{source}: `{key}` is not set; see `rl-vlm train --help`")
        elif first["type"] == "extra_forbidden":
            problems.append(f"{source}: {_unknown(key, {name: name for name in RewardSpec.model_fields})}")
        else:
            reasons = " or ".join(dict.fromkeys(map(_reason, details)))
            problems.append(f"{source}: `{key}` is {first['input']!r}: {reasons}")
    return problems


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of a setting: section, leaf, list index and key, without the names of union branches."""
    return (*loc[:2], *(part for part in loc[2:3] if isinstance(part, int)), *loc[4:])


def _reason(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
