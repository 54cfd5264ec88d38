"""`rl-vlm doctor`: find problems of a run before its first step."""

from __future__ import annotations

import argparse
import json
import os

from launch.help import path
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError
from rl_vlm.log.files import check_output, output
from rl_vlm.log.terminal import hide_bars_of_libraries, is_first_process


def add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of the doctor that are not settings of a run."""
    parser.usage = f"{parser.usage} [--no-model] [--pixels] [--json FILE] [--ranks]"
    parser.add_argument("--no-model", action="store_true", help="load no weights, and take no step")
    parser.add_argument(
        "--pixels", action="store_true",
        help="decode images to find duplicates in other files; default: compare encoded bytes",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", action="store_true",
        help="under the launcher of the run: compare all ranks with rank 0, then take two steps on all of them",
    )  # fmt: skip
    parser.add_argument("--json", type=path, metavar="FILE", help="write all findings; docs/doctor.md has the keys")


def doctor_command(config: RunConfig, options: argparse.Namespace) -> int:
    """Find problems of a run before its first step."""
    if options.ranks and options.pixels:
        raise ConfigError("--pixels compares images of rows, which --ranks does not read: leave one of them out")
    has_launcher = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if has_launcher != options.ranks:
        raise ConfigError(
            "rl-vlm doctor --ranks compares the processes of a launcher: start it as `accelerate launch … -m "
            "launch.preflight CONFIG`. Without --ranks, start it without a launcher"
        )
    from rl_vlm.tools.checks.table import examine
    from rl_vlm.tools.checks.text import report_data, report_text

    if options.json is not None:
        check_output(options.json, "--json")
    hide_bars_of_libraries()
    diagnosis = examine(config, not options.no_model, options.pixels, kind="ranks" if options.ranks else "train")
    if is_first_process():
        print(report_text(diagnosis), end="")
        if options.json is not None:
            text = json.dumps(report_data(diagnosis), indent=1, ensure_ascii=False)
            with output(options.json, "--json") as file:
                file.write_text(f"{text}\n", encoding="utf-8")
    return diagnosis.status
