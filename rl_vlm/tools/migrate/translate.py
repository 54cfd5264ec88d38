"""Translate the settings of another system, by the rows of `rl_vlm/config/elsewhere.py` and of `trl_fields.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from rl_vlm.config import trl_fields
from rl_vlm.config.conversions import NOTE, PROCESSES
from rl_vlm.config.elsewhere import LEFT_OUT, ROWS, row_of
from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.rules import CONFLICTS, FOR_TRAINING, broken
from rl_vlm.config.schema import SECTIONS, SETTINGS
from rl_vlm.config.trl_refused import CHANGE_NO_RESULT
from rl_vlm.config.unread import required, unchecked, unread_settings
from rl_vlm.errors import ConfigError, did_you_mean
from rl_vlm.tools.migrate.source import Item, Original


@dataclass
class Translation:
    """The translated settings of a script, and the others with their reasons."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Values by full name. Defaults are left out."""
    launch: dict[str, Any] = field(default_factory=dict)
    """Options of `rl-vlm launch`."""
    by_hand: list[str] = field(default_factory=list)
    """A line with the reason for everything that could not be translated."""
    to_fill_in: dict[str, list[str]] = field(default_factory=dict)
    """Unknown parts of values, and the settings in which they are."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Settings that the script leaves out and that get the other system's default, with their names there."""
    needless: list[str] = field(default_factory=list)
    """Settings that have the default here, or no meaning."""
    expected: dict[str, Any] = field(default_factory=dict)
    """Settings that the user must write by hand, with placeholder values, since other settings depend on them."""

    @property
    def is_complete(self) -> bool:
        """Return whether the user has nothing left to do."""
        return not self.by_hand and not self.to_fill_in


def translate(source: Original) -> Translation:
    """Translate the settings of a script. Raises ConfigError if a flag lacks its value."""
    result = Translation(launch=dict(source.launch), by_hand=list(source.doubts), needless=list(source.needless))
    written = {item.key for item in source.items}
    default = f"default of {source.system}"
    assumed = [Item(key, value, default) for key, value in LEFT_OUT[source.system].items() if key not in written]
    given = {item.key: item.value for item in [*assumed, *source.items]} | {PROCESSES: source.processes}
    decided: dict[str, Item] = {}
    for item in source.items:
        found = converted(source, item, given)
        if isinstance(found, Refusal):
            _refuse(result, item, found)
        else:
            _add(result, item, found, decided)
    for item in assumed:
        found = converted(source, item, given)
        if isinstance(found, Refusal):
            _refuse(result, item, found)
        else:
            _assume(result, {name: value for name, value in found.items() if name not in decided}, item)
    _leave_out_unread(result)
    result.by_hand += _problems(result)
    return result


class Refusal(NamedTuple):
    """A setting that has no equivalent here."""

    reason: str
    is_needless: bool = False
    """Whether the trained weights do not depend on it."""
    needs_environment: bool = False
    """Whether the user will set `rollout.environment` instead."""


def converted(source: Original, item: Item, given: Mapping[str, Any]) -> dict[str, Any] | Refusal:
    """Return the settings for an item by full name, with options of the launch, or the reason why there are none."""
    row = row_of(item.key, ROWS[source.system])
    needs_environment = row is not None and row.needs_environment
    try:
        if row is not None:
            found = row.converts(item.value, given) if row.converts else Refusal(row.advice, False, needs_environment)
        else:
            found = None if source.is_nested else _of_trl(item, given)
    except trl_fields.NotHere as error:
        return Refusal(error.reason, error.reason in CHANGE_NO_RESULT)
    except ValueError as error:
        return Refusal(str(error), False, needs_environment)
    except (TypeError, IndexError, KeyError, AttributeError):
        return Refusal(f"its value cannot be read; {row.advice if row else 'see rl-vlm train --help'}")
    if isinstance(found, Refusal):
        return found
    if found is None:
        known = [*ROWS[source.system], *([] if source.is_nested else trl_fields.SAME)]
        return Refusal(f"`rl-vlm migrate` does not know this setting{did_you_mean(item.key, known)}")
    return {FULL_NAMES.get(leaf, leaf): value for leaf, value in found.items()}


def _of_trl(item: Item, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert a setting of TRL, or of the same name here. Return None for an unknown setting."""
    found = trl_fields.translate(item.key, item.value, given)
    return {item.key: item.value} if found is None and item.key in FULL_NAMES else found


def _refuse(result: Translation, item: Item, refusal: Refusal) -> None:
    if refusal.is_needless:
        result.needless.append(item.key)
    elif item.unfilled:
        _must_fill_in(result, item, f"{item.key} of the script, which is not written here")
    else:
        result.by_hand.append(f"{item}: {refusal.reason}")
        if refusal.needs_environment:
            result.expected["rollout.environment"] = "module:Class"


def _must_fill_in(result: Translation, item: Item, where: str) -> None:
    for part in item.unfilled:
        result.to_fill_in.setdefault(part, []).append(where)


def _add(result: Translation, item: Item, found: Mapping[str, Any], decided: dict[str, Item]) -> None:
    """Add the settings that an item was converted to."""
    if not found:
        result.needless.append(item.key)
    for name, value in found.items():
        if name.startswith("--"):
            result.launch.setdefault(name, value)
        elif name == NOTE:
            result.by_hand.append(f"{item}: {value}")
        elif not item.has_value and value is True and bool not in _types(name):
            raise ConfigError(f"{item.place}: `--{item.key}` has no value")
        elif problem := _misfit(name, value):
            _refuse(result, item, Refusal(f"`{name}` {problem}"))
        elif name == "data.columns":
            result.settings[name] = result.settings.get(name, {}) | value
        elif name in decided and result.settings.get(name, SETTINGS[name].default) != value:
            result.by_hand.append(f"{item}: `{decided[name].key}` sets `{name}` too; keep one of them")
        elif value == SETTINGS[name].default:
            result.needless.append(item.key)
        else:
            result.settings[name] = value
            _must_fill_in(result, item, name)
        decided.setdefault(name, item)


def _assume(result: Translation, found: Mapping[str, Any], item: Item) -> None:
    """Add settings that the script leaves out, and for which the other system has another default."""
    for name, value in found.items():
        if name == NOTE:
            result.by_hand.append(f"{item}: {value}")
        elif name in SETTINGS and value != SETTINGS[name].default and not _misfit(name, value):
            result.settings[name] = value
            result.assumed[name] = item.key


def _types(name: str) -> tuple[Any, ...]:
    """Return the types of a setting's values."""
    annotation = SETTINGS[name].annotation
    return get_args(annotation) or (annotation,)


def _misfit(name: str, value: Any) -> str:
    """Return why a setting cannot have a value, or nothing."""
    section, leaf = name.split(".")
    try:
        SECTIONS[section].model_validate({**required(section), leaf: value})
    except ValidationError as error:
        detail = error.errors()[0]
        return f"cannot be {value!r}: {detail['msg'].removeprefix('Value error, ').replace('Input', 'it')}"
    return ""


def _leave_out_unread(result: Translation) -> None:
    """Leave out settings that have no effect here because of others."""
    for name in unread_settings(result.settings | result.expected):
        if name in result.settings:
            del result.settings[name]
            if result.assumed.pop(name, None) is None:
                result.needless.append(name.split(".")[1])


def _problems(result: Translation) -> Iterator[str]:
    """Yield why a run would refuse the settings."""
    if "model.model_name_or_path" not in result.settings:
        yield "`model.model_name_or_path`, the model to train, is not set"
    unknown = {name.split(".")[1] for names in result.to_fill_in.values() for name in names if name in SETTINGS}
    rules = [rule for rule in (*CONFLICTS, *FOR_TRAINING) if not unknown.intersection(rule.names.split())]
    yield from broken(unchecked(result.settings | result.expected), rules)
