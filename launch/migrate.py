"""`rl-vlm migrate`: print the YAML for a script or a file of VLM-R1, EasyR1, ms-swift or verl."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from launch.help import filled
from rl_vlm.errors import ConfigError, text_of

MAX_LENGTH = 1_000_000
"""Characters of a file. Longer files are no scripts."""


def migrate_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm migrate`."""
    from rl_vlm.tools.migrate.source import SYSTEMS

    parser = argparse.ArgumentParser(
        prog="rl-vlm migrate",
        description="Print our YAML for a script or a file of VLM-R1, EasyR1, ms-swift or verl. Comments at its end "
        "name each line that has no translation, each variable to fill in, and what is not needed. Nothing is "
        "executed.",
        epilog="example: rl-vlm migrate run_grpo.sh > my_run.yaml\n\n"
        "The exit status is 0, or 1 if a line was not translated or a variable is to fill in, or 2 if the file "
        "cannot be read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=filled, metavar="FILE",
        help="a shell script that starts a training, or a YAML file of settings; - reads standard input",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="system", type=_system, metavar="NAME",
        help=f"the system, if the file does not show it: {', '.join(SYSTEMS)}",
    )  # fmt: skip
    return parser


def _system(text: str) -> str:
    """Return the name of a system. Raises ArgumentTypeError for an unknown one."""
    from rl_vlm.tools.migrate.source import SYSTEMS

    by_letters = {system.lower(): system for system in SYSTEMS}
    if text.lower() not in by_letters:
        raise argparse.ArgumentTypeError(f"{text!r} is no system: give one of {', '.join(SYSTEMS)}")
    return by_letters[text.lower()]


def migrate_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm migrate`, and return the exit status. Raises ConfigError if the file cannot be read."""
    options = migrate_parser().parse_args(arguments)
    from rl_vlm.tools.migrate.page import page
    from rl_vlm.tools.migrate.source import read
    from rl_vlm.tools.migrate.translate import translate

    source = read(_text(options.file), options.file, options.system)
    result = translate(source)
    print(page(source, result, options.file), end="")
    return 0 if result.is_complete else 1


def _text(path: str) -> str:
    """Read a file, or standard input for `-`. Raises ConfigError if the content is not text."""
    try:
        if path == "-":
            content = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                content = file.read()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is no text in UTF-8; give a script or a YAML file") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {text_of(error)}") from error
    if len(text) > MAX_LENGTH:
        raise ConfigError(f"{path}: it has more than {MAX_LENGTH:,} characters; give a script or a YAML file")
    if "\0" in text:
        raise ConfigError(f"{path}: it is no text, but a binary file; give a script or a YAML file")
    return text.replace("\r\n", "\n")
