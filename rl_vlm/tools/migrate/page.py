"""Write a translation as a YAML file. Comments name everything that was not translated."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from rl_vlm.config import yaml_text
from rl_vlm.config.schema import SECTIONS, SETTINGS
from rl_vlm.tools.migrate.source import Original
from rl_vlm.tools.migrate.translate import Translation

WIDTH = 118
LAUNCH = ("--nodes", "--gpus", "--sharding")


def page(source: Original, result: Translation, path: str) -> str:
    """Return the YAML file: the settings by section, then the comments."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name in SETTINGS:
        if name in result.settings:
            section, leaf = name.split(".")
            sections[section][leaf] = result.settings[name]
    filled = {section: settings for section, settings in sections.items() if settings}
    blocks = [yaml_text.dump({section: settings}) for section, settings in filled.items()]
    heading = f"# Translated by `rl-vlm migrate` from {path}, which is for {source.system} (docs/migrate.md).\n"
    return "\n".join([heading, *(blocks or ["{}\n"]), *_comments(source, result)])


def _comments(source: Original, result: Translation) -> list[str]:
    """Return the blocks of comments."""
    to_fill_in = [f"{part}: in {', '.join(dict.fromkeys(names))}" for part, names in result.to_fill_in.items()]
    assumed = [
        f"{name}: {yaml_text.one_line(result.settings[name])} ({theirs})" for name, theirs in result.assumed.items()
    ]
    needless = ", ".join(dict.fromkeys(result.needless))
    blocks = [
        ("Fill in:", to_fill_in),
        ("Not translated:", result.by_hand),
        (f"Left out there, so these are the defaults of {source.system}; versions differ:", assumed),
        ("Launch:", _launch(result)),
        ("Not needed, because it is the default or has no meaning here:", [needless] if needless else []),
    ]
    return ["".join([f"# {title}\n", *map(_comment, lines)]) for title, lines in blocks if lines]


def _comment(text: str) -> str:
    lines = wrap(text, WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def _launch(result: Translation) -> list[str]:
    """Return the command that starts the run, if it is one of several processes."""
    options = " ".join(f"{name} {result.launch[name]}" for name in LAUNCH if name in result.launch)
    return [f"rl-vlm launch THIS_FILE {options} (docs/distributed.md)"] if options else []
