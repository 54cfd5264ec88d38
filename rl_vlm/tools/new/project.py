"""A new project: a directory with rows, a reward or an environment, settings, a tiny model and a README.

It runs at once.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.errors import ConfigError, did_you_mean, text_of
from rl_vlm.tools.new.families import FAMILIES
from rl_vlm.tools.new.tasks import CELLS, MOST_DOTS, SIDES, TASKS

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Project:
    """A directory to write, the kind of its task and the family of its tiny model."""

    directory: Path
    kind: str
    family: str

    def __post_init__(self) -> None:
        """Raise ConfigError if there is no such kind or family."""
        for what, name, known in (("kind", self.kind, TASKS), ("family", self.family, FAMILIES)):
            if name not in known:
                raise ConfigError(
                    f"there is no {what} {name!r}{did_you_mean(name, known)}; give one of {', '.join(known)}"
                )
        if self.kind not in FAMILIES[self.family].settings:
            able = [name for name, family in FAMILIES.items() if self.kind in family.settings]
            raise ConfigError(
                f"no tiny {self.family} learns tasks of the kind {self.kind!r}; give a family of {', '.join(able)}"
            )


def write_project(project: Project) -> None:
    """Write the directory, all of it or nothing. Raises ConfigError if it exists or cannot be written."""
    directory = project.directory
    if not directory.name.isprintable():
        raise ConfigError(f"{directory.name!r} is no name for a project; give one without line breaks")
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists already; give the name of a new directory, or remove it first")
    try:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".rl-vlm-new-") as folder:
            unfinished = Path(folder) / directory.name
            unfinished.mkdir()
            example = write_rows(unfinished / "data", project.kind)
            for name, text in texts(project, example).items():
                (unfinished / name).write_text(text, encoding="utf-8")
            unfinished.rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {text_of(error)}") from error


def write_rows(data: Path, kind: str) -> str:
    """Write the rows of a kind into a directory, with their pictures if they have some. Return the first line."""
    data.mkdir()
    lines: list[str] = []
    for name in ("train", "test"):
        first = len(lines)
        for row in TASKS[kind].rows(name):
            if "image" in row:
                path = data / "images" / f"{row['id']}.png"
                path.parent.mkdir(exist_ok=True)
                row["image"].save(path)
                row = {"image": f"images/{path.name}"} | {key: row[key] for key in row if key != "image"}
            lines.append(json.dumps(row))
        (data / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines[first:]), encoding="utf-8")
    return lines[0]


def texts(project: Project, example: str) -> dict[str, str]:
    """Return the text of each file but the data's. `example` is the line of a row."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folders = [TEMPLATES / project.kind, TEMPLATES]  # a kind may have a template of its own in place of a shared one
    environment = Environment(
        undefined=StrictUndefined, loader=FileSystemLoader(folders), trim_blocks=True, keep_trailing_newline=True
    )
    values = template_values(project) | {"example": example}
    names = {path.name for folder in folders for path in folder.glob("*.jinja")}
    return {name.removesuffix(".jinja"): environment.get_template(name).render(values) for name in sorted(names)}


def template_values(project: Project) -> dict[str, Any]:
    """Return the values that templates show."""
    family, task = FAMILIES[project.family], TASKS[project.kind]
    return {
        "name": project.directory.name, "kind": project.kind, "family": project.family, "prompt": task.prompt,
        "function": task.function, "expect": task.expect, "minutes": task.minutes, "real_model": family.model,
        "num_train": task.num_rows["train"], "num_test": task.num_rows["test"], "most_dots": MOST_DOTS, "sides": SIDES,
        "cells": CELLS,
    } | family.settings[project.kind]  # fmt: skip
