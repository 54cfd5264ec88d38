"""`rl-vlm report`: write the report of a run or an evaluation again, compare several, or list all in a directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch.help import path


def at_least_100(text: str) -> int:
    """Return a number of completions. Raises ArgumentTypeError if a page could not show a group with so few."""
    if not text.isdecimal() or int(text) < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 100 or more")
    return int(text)


def report_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm report`."""
    parser = argparse.ArgumentParser(
        prog="rl-vlm report",
        description="Write the report of a run or an evaluation again, compare several, or list all in a directory.",
    )
    parser.add_argument(
        "folders", nargs="+", type=path, metavar="FOLDER",
        help="train.output_dir of a run, complete or not, or its evaluation/. Several folders: one page compares them. "
        "A directory that contains runs: the page is an index of them",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=path, metavar="FILE",
        help="file to write; default: report.html in FOLDER, or, if there are several, in the current directory; "
        "index.html in a directory that holds runs",
    )  # fmt: skip
    parser.add_argument(
        "--completions", type=at_least_100, metavar="N",
        help="maximum number of completions on the page, spread evenly over the windows; default: 10000",
    )  # fmt: skip
    return parser


def report_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm report`, and return the exit status. Raises ConfigError if a folder holds no run."""
    options = report_parser().parse_args(arguments)
    from rl_vlm.tools.report.build import report_path, write_report
    from rl_vlm.tools.report.index import INDEX, runs_in, write_index
    from rl_vlm.tools.report.rollouts import MOST_ROLLOUTS

    if len(options.folders) == 1 and (runs := runs_in(options.folders[0])):
        output = options.output or options.folders[0] / INDEX
        write_index(runs, output)
        print(f"The index of {len(runs)} runs is {output}")
        return 0
    output = options.output or report_path(options.folders)
    write_report(options.folders, output, most=options.completions or MOST_ROLLOUTS)
    print(f"The report is {output}")
    return 0
