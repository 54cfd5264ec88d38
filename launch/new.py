"""`rl-vlm new`: write a new project, which runs at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch.help import path


def new_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm new`."""
    from rl_vlm.tools.new.families import FAMILIES
    from rl_vlm.tools.new.tasks import TASKS

    kinds = "\n".join(f"  {name:12}{task.summary}" for name, task in TASKS.items())
    families = "\n".join(f"  {name:12}{', '.join(family.settings)}" for name, family in FAMILIES.items())
    parser = argparse.ArgumentParser(
        prog="rl-vlm new",
        description="Write a project of your own: rows with pictures, a reward or an environment, a YAML file with\n"
        "settings that learn, and a README. It runs at once, from a tiny model that needs no download and no GPU.",
        epilog=f"kinds:\n{kinds}\n\nfamilies, with the kinds that their tiny models learn:\n{families}\n\n"
        "example: rl-vlm new my_task --kind box --family internvl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=path, metavar="NAME", help="directory to write, which must not exist")
    parser.add_argument("--kind", default="answer", metavar="KIND", help="what the model does; default: answer")
    parser.add_argument(
        "--family", default="qwen2_5_vl", metavar="FAMILY", help="family of the tiny model; default: qwen2_5_vl"
    )
    return parser


def new_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm new`, and return the exit status. Raises ConfigError if the project cannot be written."""
    options = new_parser().parse_args(arguments)
    from rl_vlm.tools.new.project import Project, write_project
    from rl_vlm.tools.new.tasks import TASKS

    project = Project(options.directory, options.kind, options.family)
    write_project(project)
    print(f"{options.directory} has rows, {TASKS[options.kind].part}, settings and a README. Start its run:\n")
    print(f"  cd {options.directory}\n  rl-vlm train run.yaml")
    return 0
