"""The `rl-vlm` command. What a command runs is imported when it runs: help and config errors need no torch."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from rl_vlm.config.batch_algebra import plan_batches
from rl_vlm.config.describe import describe, settings_help
from rl_vlm.config.load import check_evaluable, check_trainable, load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, RLVLMError


def train_command(config: RunConfig, dry_run: bool) -> None:
    """Train a model with GRPO."""
    check_trainable(config)
    plan = plan_batches(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    if dry_run:
        return _print(describe(config, plan))
    from rl_vlm.report.outcome import training_outcome
    from rl_vlm.trainer import train

    _hide_progress_of_files()
    _print(training_outcome(train(config), config.train.output_dir) + "\n")


def eval_command(config: RunConfig, dry_run: bool) -> None:
    """Sample from a model and score the completions, without training."""
    check_evaluable(config)
    if dry_run:
        return _print(describe(config))
    from rl_vlm.evaluation import evaluate_run
    from rl_vlm.report.outcome import evaluation_outcome

    _hide_progress_of_files()
    _print(evaluation_outcome(evaluate_run(config), config.train.output_dir) + "\n")


COMMANDS: dict[str, Callable[[RunConfig, bool], None]] = {"train": train_command, "eval": eval_command}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `rl-vlm COMMAND …`; the exit status is 2 for an error that the user can mend."""
    commands = "\n".join(f"  {name:8}{command.__doc__}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rl-vlm",
        usage="rl-vlm [-h] COMMAND CONFIG [KEY=VALUE ...] [--dry-run]",
        description="GRPO post-training for vision-language models.",
        epilog=f"commands:\n{commands}\n\n`rl-vlm COMMAND --help` lists every setting.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return run(options.command, options.arguments)


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the command `name` and returns its exit status."""
    options = _parser(name).parse_intermixed_args(arguments)
    sys.path.append(os.getcwd())  # `module:function` settings name modules beside the config, as under `python -m`
    try:
        COMMANDS[name](load_config(options.config, options.overrides), options.dry_run)
    except RLVLMError as error:
        # Every process finds the same fault in a config; other errors may be one process's own.
        if _is_first_process() or not isinstance(error, ConfigError):
            print(f"rl-vlm {name} {options.config} failed:\n{error}", file=sys.stderr)
        return 2
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"rl-vlm {name}",
        usage=f"rl-vlm {name} [-h] CONFIG [KEY=VALUE ...] [--dry-run]",
        description=COMMANDS[name].__doc__,
        epilog=f"settings, by section:\n\n{settings_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file: sections, or flat keys as in TRL")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="setting that wins over CONFIG's, as in train.max_steps=10",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run and stop")
    return parser


def _hide_progress_of_files() -> None:
    """One bar on the terminal: transformers shows one for every model file that it reads or writes."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _print(text: str) -> None:
    if _is_first_process():
        print(text, end="")


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
