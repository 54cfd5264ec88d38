"""`rl-vlm doctor`: everything that can be found before the first step of a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from launch.terminal import hide_bars_of_libraries
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of the doctor that are not settings of a run."""
    parser.usage = f"{parser.usage} [--no-model] [--pixels] [--json FILE]"
    parser.add_argument("--no-model", action="store_true", help="load no weights, and take no step")
    parser.add_argument(
        "--pixels", action="store_true",
        help="decode images to find duplicates in other files; default: compare encoded bytes",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings; docs/doctor.md has the keys")


def doctor_command(config: RunConfig, options: argparse.Namespace) -> int:
    """Find what is wrong with a run before its first step."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("rl-vlm doctor runs in one process; start it without a launcher")
    from rl_vlm.doctor.examine import examine
    from rl_vlm.doctor.report import report_text, write_json

    hide_bars_of_libraries()
    diagnosis = examine(config, with_model=not options.no_model, decode=options.pixels)
    print(report_text(diagnosis), end="")
    if options.json is not None:
        write_json(diagnosis, options.json)
    return diagnosis.status
