"""Help of the command line: the most used settings, a section, or all settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.config.describe import DATA_ENTRY, REWARD_ENTRY, settings_help, short_help
from rl_vlm.config.schema import SECTIONS
from rl_vlm.errors import shorten, text_of

MOST_USED = """
    model_name_or_path dtype use_peft dataset_name eval_dataset_name prompt_template max_pixels engine num_generations
    max_completion_length temperature reward_funcs loss_type beta num_iterations output_dir resume_from_checkpoint
    prompts_per_step num_train_epochs max_steps learning_rate save_steps eval_steps endpoint_url micro_batch_tokens
    gradient_checkpointing report_to
""".split()

ENTRIES = {"data": DATA_ENTRY, "rewards": REWARD_ENTRY}
"""Sections with lists whose entries have their own settings."""

MORE = """\
`--help-all` shows every setting, and `--help SECTION` those of a section:
  {sections}
"""


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add `--help`, `--help SECTION` and `--help-all`."""
    parser.add_argument(
        "-h", "--help", action=_Help, nargs="?", metavar="SECTION", help="show the most used settings, or a section"
    )
    parser.add_argument("--help-all", action=_Help, nargs=0, help="show every setting and exit")


def add_sharding(parser: argparse.ArgumentParser, choices: Sequence[str], default: str) -> None:
    """Add `--sharding`. Its earlier name `--engine` is refused."""
    parser.add_argument("--sharding", choices=choices, help=f"how ranks hold the model; default: {default}")
    parser.add_argument("--engine", type=_refuse_engine, help=argparse.SUPPRESS)


def _refuse_engine(name: str) -> None:
    raise argparse.ArgumentTypeError(f"write --sharding {name}: an engine is what samples (rollout.engine)")


class _Help(argparse.Action):
    """Print the help and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if option_string == "--help-all":
            print(f"{parser.format_help()}\nsettings, by section:\n\n{settings_help()}")
        elif values is None:
            more = MORE.format(sections=" ".join(SECTIONS))
            print(f"{parser.format_help()}\nmost used settings:\n\n{short_help(MOST_USED)}\n\n{more}", end="")
        elif values in SECTIONS:
            print(settings_help([name for name in (str(values), ENTRIES.get(str(values))) if name]))
        else:
            parser.error(f"--help {values}: there is no such section; sections: {', '.join(SECTIONS)}")
        parser.exit()


def host(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is not printable, or empty, which would mean every interface."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no host: give a name or an address")
    return text


LAST_PORT = 65535
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Values of `--host` that other machines cannot reach."""


def add_host(parser: argparse.ArgumentParser) -> None:
    """Add `--host` to the parser of a command that listens."""
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", metavar="HOST",
        help="interface to listen on; default: 127.0.0.1, which other machines cannot reach",
    )  # fmt: skip


def port(text: str) -> int:
    """Return the number of a port. Raises ArgumentTypeError if it is not one."""
    number = int(text) if text.isdecimal() and len(text) <= len(str(LAST_PORT)) else 0
    if not 1 <= number <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 1 to {LAST_PORT}")
    return number


def port_or_any(text: str) -> int:
    """Return the number of a port, or 0, which stands for any free port."""
    return 0 if text == "0" else port(text)


def filled(text: str) -> str:
    """Return the text. Raises ArgumentTypeError if it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    """Return a path, which need not exist. Raises ArgumentTypeError if the file system cannot have such a path."""
    try:
        os.lstat(filled(text))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, not permitted, or with a zero byte
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is no path here: {text_of(error)}") from error
    return Path(text)
