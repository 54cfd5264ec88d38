"""Load the settings of a run from a YAML file and `key=value` overrides, and report all problems at once.

A key is `section.leaf`, or a leaf alone, which is unique. A leaf alone has TRL's meaning: `trl_fields` converts TRL's
names. In a file without sections, settings that are left out get TRL's defaults (`trl_defaults`). A null value stands
for the default; an empty one is refused. As in TRL, `use_vllm: false` disables the settings of vLLM, so that a file can
keep them for another run.
"""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_vlm.config import trl_fields, yaml_text
from rl_vlm.config.elsewhere import NESTED, instead_of, value_instead
from rl_vlm.config.engines import engine_named
from rl_vlm.config.rules import FOR_EVALUATION, FOR_TRAINING, broken
from rl_vlm.config.schema import SECTIONS, SETTINGS, DataSource, RewardSpec, RunConfig
from rl_vlm.config.secrets import STARS, starred_places, without_secrets
from rl_vlm.config.trl_defaults import has_trackers, is_flat, missing_defaults, trl_defaults, without_defaults
from rl_vlm.config.trl_objects import given_fields, is_trl_object, plain
from rl_vlm.errors import ConfigError

logger = logging.getLogger(__name__)

FULL_NAMES = {setting.split(".")[1]: setting for setting in SETTINGS}
KNOWN_KEYS = FULL_NAMES | {section: section for section in SECTIONS}

DISABLED_BY_USE_VLLM = ("vllm.", "algorithm.vllm_")
"""Prefixes of the settings that `use_vllm: false` disables."""


def load_config(path: str | Path, overrides: Iterable[str] = (), fixed: Mapping[str, Any] = {}) -> RunConfig:
    """Load the YAML file at `path` with `overrides` such as `train.max_steps=10` or `max_steps=10`.

    `fixed` maps full names to values that take precedence over both.
    Raises ConfigError with one line per problem: source, key, value, and what would be valid.
    """
    in_file, (typed, problems) = _read_file(path), parse_overrides(overrides)
    return _merge((str(path), in_file), ("command line", typed), fixed, problems)


def config_with(settings: Mapping[str, Any], source: str, overrides: Iterable[str]) -> RunConfig:
    """Build the config from `settings` by full name and `overrides`. Messages name `source` for the settings.

    Raises ConfigError like `load_config`.
    """
    typed, problems = parse_overrides(overrides)
    return _merge((source, dict(settings)), ("command line", typed), {}, problems)


def config_from(args: Any, keywords: Mapping[str, Any]) -> RunConfig:
    """Build the config of `GRPOTrainer` from `args`, with `keywords` as overrides.

    `args` is a YAML file, a dict with the content of such a file, a GRPOConfig of TRL, or None.
    Raises ConfigError like `load_config`, and if `args` is something else.
    """
    if isinstance(args, str | os.PathLike):
        base = (os.fspath(args), _read_file(os.fspath(args)))
    elif is_trl_object(args):
        base = (type(args).__name__, _flatten(type(args).__name__, plain(given_fields(args))))
    elif args is None or isinstance(args, Mapping):
        base = ("args", _flatten("args", plain(dict(args or {}))))
    else:
        raise ConfigError(f"args is a {type(args).__name__}: give a YAML file, a dict, or a GRPOConfig of TRL")
    return _merge(base, ("GRPOTrainer", _flatten("GRPOTrainer", plain(dict(keywords)))), {}, [])


def _merge(
    base: tuple[str, dict[str, Any]],
    over: tuple[str, dict[str, Any]],
    fixed: Mapping[str, Any],
    problems: list[str],
) -> RunConfig:
    """Merge two sources of keys into a config. `over` takes precedence over `base`, and `fixed` over both.

    A source is its name in messages, and its values by key. Raises ConfigError with `problems` and all others.
    """
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    disabled: set[str] = set()
    (path, in_file), (overrides, typed) = base, over
    flat = is_flat(in_file)
    in_file = without_defaults(in_file) if flat else in_file
    for source, keys, given in ((path, in_file, in_file), (overrides, typed, in_file | typed)):
        found, refused = _resolve(keys, given)
        settings |= found
        disabled -= found.keys()
        if keys.get("use_vllm") is False:
            disabled = {name for name in settings if name.startswith(DISABLED_BY_USE_VLLM)}
        sources |= dict.fromkeys(found, source)
        problems += [f"{source}: {problem}" for problem in refused]
    settings |= fixed
    problems += _starred_problems(settings, sources, path)
    chosen = settings.get("rollout.engine")
    engine = engine_named(SETTINGS["rollout.engine"].default if chosen is None else chosen)
    if engine is not None and not engine.reads:
        settings = {name: value for name, value in settings.items() if name not in disabled}
    notes: list[str] = []
    if flat and sources.get("log.logging_steps") == path and not has_trackers(settings):
        notes.append(f"`logging_steps` {settings.pop('log.logging_steps')} is left out: `metrics.jsonl` has every step")
    defaults = trl_defaults(settings) if flat else {}

    try:
        config = RunConfig.model_validate(_nest(settings | defaults))
    except ValidationError as error:
        problems += _validation_problems(error, sources, path)
    if problems:
        raise ConfigError(without_secrets("\n".join(problems)))
    if flat and os.environ.get("RANK", "0") == "0":
        _log_defaults(path, defaults, [*notes, *missing_defaults(settings, in_file)])
    return config


def _starred_problems(settings: Mapping[str, Any], sources: Mapping[str, str], path: str) -> Iterator[str]:
    """Yield a line for each value that is starred out."""
    for setting, value in settings.items():
        for place in starred_places(value, setting):
            yield (
                f"{sources.get(setting, path)}: `{place}` is starred out ({STARS}), since a run writes no secrets; set "
                f"`{setting}` again with the value, or let the function read it from an environment variable"
            )


def _log_defaults(path: str, taken: Mapping[str, Any], notes: Iterable[str]) -> None:
    """Log the defaults of TRL that were taken, and the notes about others."""
    values = ", ".join(f"{name.split('.')[1]} {yaml_text.one_line(value)}" for name, value in taken.items())
    lines = [f"{path} has no sections, so what it leaves out has TRL's default: {values}", *notes]
    logger.warning("%s", "\n  ".join(lines))


def check_trainable(config: RunConfig) -> None:
    """Raise ConfigError if `config` lacks a setting that only training needs, or has one that training cannot use."""
    if problems := list(broken(config, FOR_TRAINING)):
        raise ConfigError("\n".join(problems))


def check_evaluable(config: RunConfig) -> None:
    """Raise ConfigError if `config` lacks a setting that an evaluation needs."""
    if problems := list(broken(config, FOR_EVALUATION)):
        raise ConfigError("\n".join(problems))


def _read_file(path: str | Path) -> dict[str, Any]:
    """Read the settings of a file by key. A key in a section becomes `section.leaf`."""
    try:
        content = yaml_text.parse(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # bytes that are no UTF-8, or a zero byte in the path
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    return _flatten(str(path), {} if content is None else content)


def _flatten(source: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected `key: value` settings, found {content!r}")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        found: dict[str, Any] = {}
        if isinstance(value, dict) and key in SECTIONS:
            found = {f"{key}.{leaf}": leaf_value for leaf, leaf_value in value.items()}
        elif isinstance(value, dict) and key.partition(".")[0] in NESTED:
            found = _flatten(source, {f"{key}.{leaf}": leaf_value for leaf, leaf_value in value.items()})
        elif key not in SECTIONS or value is not None:
            found = {str(key): value}
        if twice := [name for name in found if name in flat and flat[name] != found[name]]:
            raise ConfigError(f"{source}: `{twice[0]}` is set to {flat[twice[0]]!r} and {found[twice[0]]!r}; keep one")
        flat |= found
    return flat


def parse_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse overrides. Returns values by key, and a message for each override without a value."""
    keys, problems = {}, []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"command line: `{override}` is not of the form key=value")
        if not text.strip():
            problems.append(f"command line: `{override}` has no value; write `{key}=null` for the default")
            continue
        try:
            keys[key] = yaml_text.parse(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"command line: the value of `{override}` is not YAML; quote it: {_quoted(key, text)}: {error}"
            ) from error
    return _flatten("command line", keys), problems


def _resolve(keys: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return values by full setting name, and a message for each key that is unknown, refused or contradicts another.

    `given` holds the keys that conversions of TRL's fields may read.
    """
    settings: dict[str, Any] = {}
    given_by: dict[str, str] = {}
    problems: list[str] = []
    for key, value in keys.items():
        if key in SECTIONS:
            problems.append(
                f"`{key}` is a section and holds `key: value` settings, found {value!r}; "
                f"did you mean `{key}.{next(iter(SECTIONS[key].model_fields))}`?"
            )
            continue
        try:
            found = _settings_of(key, value, given)
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


def _settings_of(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    if key in SETTINGS:
        return {key: value}
    if key in FULL_NAMES and value is None and key not in trl_fields.NULL_IS_OFF:
        return {FULL_NAMES[key]: None}
    translated = trl_fields.translate(key, value, given)
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
    """Build the message about an unknown key. Give advice if another system has it, else name the closest key.

    `known` maps the last parts of keys to full names.
    """
    if instead := instead_of(key):
        return f"unknown setting `{key}`; {instead}"
    closest = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
    hint = f"the closest is `{known[closest[0]]}`" if closest else "see `rl-vlm train --help`"
    return f"unknown setting `{key}`; {hint}"


def _validation_problems(error: ValidationError, sources: Mapping[str, str], path: str) -> list[str]:
    """Return one line per setting. Pydantic reports each branch of a union separately."""
    by_place: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        is_name = detail["loc"][-1:] in (("str",), ("constrained-str",))
        if not is_name or not isinstance(detail["input"], dict | list):  # a dict or list is not meant as a name
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
            entry = RewardSpec if place[0] == "rewards" else DataSource
            problems.append(f"{source}: {_unknown(key, {name: name for name in entry.model_fields})}")
        else:
            reasons = " or ".join(dict.fromkeys(map(_reason, details)))
            advice = value_instead(key, first["input"]) or _quoting(key, details)
            problems.append(f"{source}: `{key}` is {first['input']!r}: {'; '.join(filter(None, [reasons, advice]))}")
    return problems


def _quoting(key: str, details: list[ErrorDetails]) -> str | None:
    """Return how to quote a text in braces if YAML read it as a mapping, else None."""
    value = details[0]["input"]
    is_text = isinstance(value, dict) and all(item is None for item in value.values())  # of which `{a}` is an example
    if not is_text or not all(detail["type"] == "string_type" for detail in details):
        return None
    text = yaml_text.one_line(value).replace(": null", "")
    return f"YAML reads braces as a mapping, so quote the text: {_quoted(key, text)}"


def _quoted(key: str, text: str) -> str:
    """Return how to write a text that YAML would read as something else, in a shell and in a file."""
    leaf = key.rpartition(".")[2]
    text = text.replace('"', '\\"')
    return f'`\'{leaf}="{text}"\'` on the command line, `{leaf}: "{text}"` in a file'


def _place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of a setting: section, leaf, list index and key, without the names of union branches."""
    if str(loc[2:3]).startswith("('list["):
        loc = (*loc[:2], *loc[3:])
    return (*loc[:2], *(part for part in loc[2:3] if isinstance(part, int)), *loc[4:])


def _reason(detail: ErrorDetails) -> str:
    if detail["type"] == "string_too_short":
        return "it is empty; write null for the default"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "it should be")
