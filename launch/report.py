"""`rl-vlm report`: write the report of a run or an evaluation again, or compare several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch.help import path


def report_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm report`."""
    parser = argparse.ArgumentParser(
        prog="rl-vlm report",
        description="Write the report of a run or an evaluation again, or compare several.",
    )
    parser.add_argument(
        "folders", nargs="+", type=path, metavar="FOLDER",
        help="train.output_dir of a run, complete or not, or the evaluation/ in it; of several, one page compares all",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=path, metavar="FILE",
        help="file to write; default: report.html in FOLDER, or, if there are several, in the current directory",
    )  # fmt: skip
    return parser


def report_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm report`, and return the exit status. Raises ConfigError if a folder holds no run."""
    options = report_parser().parse_args(arguments)
    from rl_vlm.tools.report.build import report_path, write_report

    output = options.output or report_path(options.folders)
    write_report(options.folders, output)
    print(f"The report is {output}")
    return 0
