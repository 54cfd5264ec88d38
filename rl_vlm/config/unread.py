"""Settings that a run would not read, found without the rules that refuse a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vlm.config.rules import WITHOUT_EFFECT, broken
from rl_vlm.config.schema import SECTIONS
from rl_vlm.config.sections import Sections


def unread_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the full names of settings that have no effect because of others, also once the first ones are left out.

    Raises pydantic's ValidationError if a value is not one of its setting.
    """
    kept, found = dict(settings), []
    while True:
        run = unchecked(kept)
        rules = [rule for rule in WITHOUT_EFFECT if any(broken(run, [rule]))]
        leaves = {leaf for rule in rules for leaf in rule.names.split()}
        names = [name for name in kept if name.split(".")[1] in leaves]
        if not names:
            return found
        found += names
        kept = {name: value for name, value in kept.items() if name not in names}


def unchecked(settings: Mapping[str, Any]) -> Sections:
    """Build settings by full name without the rules about several of them, with values for those that are required."""
    given = by_section(settings)
    return Sections.model_validate({section: required(section) | given.get(section, {}) for section in SECTIONS})


def by_section(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by full name as sections of a file."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, leaf = name.split(".")
        sections.setdefault(section, {})[leaf] = value
    return sections


def required(section: str) -> dict[str, Any]:
    """Return values for settings that a section needs."""
    return {name: "model" for name, field in SECTIONS[section].model_fields.items() if field.is_required()}
