"""The `rl-vlm` command. Commands import modules when they run, so help and config errors need no torch."""

import argparse
import atexit
import gc
import io
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from launch.doctor import add_doctor_flags, doctor_command
from launch.help import add_help, add_host, port
from launch.nodes import add_launch_flags, launch_command
from launch.plan import add_plan_flags, plan_command
from launch.start import announce, importing
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_evaluable, check_trainable, load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.config.secrets import without_secrets
from rl_vlm.distributed.launcher import check_numbers, end_with_launcher, is_one_of_several
from rl_vlm.distributed.signals import handled, ignored_afterwards, kill_children, stop
from rl_vlm.errors import ConfigError, RLVLMError, Stopped, did_you_mean
from rl_vlm.log.terminal import hide_bars_of_libraries, is_first_of_machine, is_first_process, shown_log
from rl_vlm.passes.allocator import configure_allocator

EXIT_SECONDS = 30.0
"""After a command, threads and processes of users' functions have this many seconds to end."""


def train_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Train a model with GRPO."""
    if options.dry_run:
        from launch.dry_run import dry_run

        return _show(*dry_run(config, "train"))
    check_trainable(config)
    configure_allocator(config)
    batch_sizes(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    announce(config, "train", [config.model.model_name_or_path])
    with importing():
        # Loading uses these classes. Here their import is without garbage collections.
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor  # noqa: F401

        from rl_vlm.run.outcome import training_outcome
        from rl_vlm.run.run import train
        from rl_vlm.tools.instruments import INSTRUMENTS

        hide_bars_of_libraries()
    summary = train(config, INSTRUMENTS)
    if is_first_process():
        print(training_outcome(summary, config.train.output_dir))


def eval_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Sample from a model and score the completions, without training."""
    from rl_vlm.evaluation.options import EvaluationOptions

    checkpoints = options.checkpoint or [config.model.model_name_or_path]
    evaluation_options = EvaluationOptions(options.by, options.keep, options.keep_by)
    if options.dry_run:
        from launch.dry_run import dry_run

        return _show(*dry_run(config, "eval", checkpoints, evaluation_options))
    check_evaluable(config)
    configure_allocator(config)
    announce(config, "eval", checkpoints)
    with importing():
        from rl_vlm.evaluation.run import compare_checkpoints
        from rl_vlm.log.outcome import comparison_outcome, evaluation_outcome
        from rl_vlm.tools.report.build import evaluation_report

        hide_bars_of_libraries()
    with evaluation_report(config):
        summaries = compare_checkpoints(config, checkpoints, evaluation_options)
    if len(summaries) > 1:
        return _print(comparison_outcome(summaries, config.train.output_dir) + "\n")
    (summary,) = summaries.values()
    _print(evaluation_outcome(summary, config.train.output_dir) + "\n")


def serve_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Start a run's vLLM servers on this machine, for a trainer elsewhere."""
    if options.dry_run:
        from launch.dry_run import dry_run

        return _show(*dry_run(config, "serve"))
    from launch.serve import serve

    hide_bars_of_libraries()
    serve(config, [options.config, *options.overrides], options.host, options.port)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address of the servers."""
    parser.usage = f"{parser.usage} [--host HOST] [--port PORT]"
    add_host(parser)
    parser.add_argument(
        "--port", type=port, metavar="PORT",
        help="port of the first server; further servers take the next ports; default: any free port",
    )  # fmt: skip


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of an evaluation that are not settings of a run."""
    parser.usage = f"{parser.usage} [--by COLUMN] [--keep LOW..HIGH] [--keep-by FUNCTION] [--checkpoint PATH]"
    parser.add_argument(
        "--by", action="append", default=[], metavar="COLUMN",
        help="repeat the figures for every value of this column of the data; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=_rates, metavar="LOW..HIGH",
        help="write the prompts whose success rate lies in this range, as in 0.1..0.9, to evaluation/kept.parquet, to "
        "train on; a completion succeeds if its score is `solved_from` or more",
    )  # fmt: skip
    parser.add_argument(
        "--keep-by", metavar="FUNCTION",
        help="reward function whose score decides; default: the function with the largest weight",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="PATH",
        help="evaluate this model instead of model_name_or_path; given several times, they are compared in a table",
    )  # fmt: skip


class _Version(argparse.Action):
    """Print the version and exit. Only this needs an installed rl-vlm."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rl-vlm {version('rl-vlm')}")
        parser.exit()


def _rates(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        rates = float(low), float(high)
    except ValueError:
        rates = (1.0, 0.0)
    if not dots or not 0 <= rates[0] <= rates[1] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of success rates from 0 to 1, such as 0.1..0.9")
    return rates


COMMANDS: dict[str, Callable[[RunConfig, argparse.Namespace], int | None]] = {
    "train": train_command,
    "eval": eval_command,
    "serve": serve_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "launch": launch_command,
}
"""A command returns its exit status, or None for 0."""
OTHERS = {
    "new": "Write a project of your own: rows, a reward, settings that learn and a tiny model.",
    "rewards": "List, show and check reward functions: `rl-vlm rewards list | show | check`.",
    "report": "Write the report of a run or an evaluation again, or compare several.",
    "export": "Write the model of a run as a directory that transformers, peft and vLLM load.",
    "migrate": "Print our YAML for a script or a file of VLM-R1, EasyR1, ms-swift or verl.",
    "chat": "Serve a checkpoint with OpenAI's chat completions, for benchmarks.",
}
"""Commands that read their own arguments, with their help."""
FIRST_COMMANDS = ("new", "train", "eval", "doctor", "plan", "report")
"""The commands to know first."""
GREETING = """\
rl-vlm trains vision-language models with GRPO. The commands to know:

{commands}

Begin with a project of your own, which learns within minutes on a CPU:

  rl-vlm new my_task
  cd my_task
  rl-vlm train run.yaml

`rl-vlm --help` lists all commands, and `rl-vlm train --help` the most used settings.
"""
FIXED: dict[str, dict[str, Any]] = {"serve": {"rollout.engine": "vllm_server", "vllm.vllm_enable_sleep_mode": False}}
"""Settings that a command fixes."""
JOINED = ("train", "eval")
"""Commands that join the processes of a launch."""
STOPPED_BY_SIGNALS = (*JOINED, "doctor", "rewards")
"""Commands that handle signals, and then end with the exit status of the signal."""
FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "eval": add_eval_flags, "serve": add_serve_flags, "plan": add_plan_flags, "doctor": add_doctor_flags,
    "launch": add_launch_flags,
}  # fmt: skip


def command() -> NoReturn:
    """Run the `rl-vlm` command, and end the process."""
    end_process_after(main)


def end_process_after(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with the status that it returns.

    Wait for threads and child processes, as Python does. Users' functions may start some that never end, so end the
    process after `EXIT_SECONDS`, with a message that names them. Do not tear the interpreter down: a thread in C++ code
    that needs Python's lock meanwhile, such as gloo's or the watch's, would abort the process.
    """
    status = 1
    try:
        with ignored_afterwards():
            status = main()
    except SystemExit as ended:  # raised by argparse
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    timer = threading.Timer(EXIT_SECONDS, end_at_once, [status])
    timer.daemon = True
    timer.start()
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    _end(status)


def end_at_once(status: int) -> NoReturn:
    """Print the names of threads and child processes that still run, kill the children, and end the process."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    children = multiprocessing.active_children()
    names = ", ".join(other.name for other in [*threads, *children] if not other.daemon)
    print(
        f"rl-vlm has finished, but threads or processes of users' functions still run: {names or 'unnamed'}. "
        "They are ended with it.",
        file=sys.stderr,
        flush=True,
    )
    kill_children()
    _end(status)


def _end(status: int) -> NoReturn:
    """Flush all open files, and end the process without tearing the interpreter down."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):  # the reader has ended, or stdout is closed
        pass
    except OSError as error:
        print(f"rl-vlm: its output could not be written: {error}", file=sys.stderr)
        status = status or 1
    gc.unfreeze()  # or it would leave out files that were opened before
    for kind in (io.TextIOWrapper, io.BufferedWriter):  # the former write into the latter
        for file in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
            with suppress(Exception):
                file.flush()
    os._exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rl-vlm COMMAND …` and return its exit status, which is 2 for an error that the user can fix.

    Without a command, print the commands to begin with.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        _print(GREETING.format(commands=_command_lines(FIRST_COMMANDS)))
        return 0
    parser = argparse.ArgumentParser(
        prog="rl-vlm",
        usage="rl-vlm [-h] [--version] COMMAND CONFIG [KEY=VALUE ...] [--dry-run]",
        description="GRPO post-training for vision-language models.",
        epilog=f"commands:\n{_command_lines(described_commands())}\n\n"
        "`rl-vlm COMMAND --help` shows the most used settings.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    parser.add_argument("command", type=_command_name, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return run(options.command, options.arguments)


def described_commands() -> dict[str, str | None]:
    """Return all commands with their help."""
    return {name: command.__doc__ for name, command in COMMANDS.items()} | OTHERS


def _command_lines(names: Iterable[str]) -> str:
    """Return a line per command, with its help."""
    texts = described_commands()
    return "\n".join(f"  {name:8}{texts[name]}" for name in names)


def _command_name(text: str) -> str:
    """Return the name of a command. For an unknown name, raise ArgumentTypeError with the closest commands."""
    commands = described_commands()
    if text in commands:
        return text
    if text.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(f"{text} is no command, but a config (did you mean `rl-vlm train {text}`?)")
    raise argparse.ArgumentTypeError(
        f"there is no command {text!r}{did_you_mean(text, commands)}; commands: {', '.join(commands)}"
    )


def run(name: str, arguments: Sequence[str]) -> int:
    """Run the command `name` and return its exit status: 2 for an error that the user can fix, 130 for Ctrl-C, 143 for
    SIGTERM, 1 if another process of the run is lost.

    `doctor` returns 0, 1 for warnings, or 2 for errors.
    """
    if name in OTHERS:
        return run_other(name, arguments)
    options = _parser(name).parse_intermixed_args(arguments)
    try:
        with handled_signals(name, is_joining=joins(name, options)):
            return _run_in_log(name, options)
    except KeyboardInterrupt:  # before the command has begun
        return stop.exit_status


def handled_signals(name: str, is_joining: bool = False) -> AbstractContextManager[None]:
    """Return a context that handles signals if the command is one of `STOPPED_BY_SIGNALS`."""
    return handled(is_joining) if name in STOPPED_BY_SIGNALS else nullcontext()


def joins(name: str, options: argparse.Namespace) -> bool:
    """Return whether the command joins this process with others."""
    return name in JOINED and not options.dry_run and is_one_of_several()


def _run_in_log(name: str, options: argparse.Namespace) -> int:
    """Load the config, run the command and return its status. Errors are printed."""
    try:
        check_numbers()
        config = load_config(options.config, options.overrides, FIXED.get(name, {}))
        end_with_launcher()
        with shown_log():
            return _run_command(name, config, options)
    except RLVLMError as error:
        # All processes of a machine find the same error in a config; other errors may occur in one process only.
        if is_first_of_machine() or not isinstance(error, ConfigError):
            _print_failure(f"{name} {options.config}", error)
        if joins(name, options):
            from rl_vlm.distributed.ranks import refuse_together

            refuse_together()
        return error.exit_status


def run_other(name: str, arguments: Sequence[str]) -> int:
    """Run a command of `OTHERS`, which reads its own arguments, and return the exit status."""
    from launch.chat import chat_command
    from launch.export import export_command
    from launch.migrate import migrate_command
    from launch.new import new_command
    from launch.report import report_command
    from launch.rewards import rewards_command

    commands = {
        "rewards": rewards_command, "report": report_command, "export": export_command, "chat": chat_command,
        "migrate": migrate_command, "new": new_command,
    }  # fmt: skip
    try:
        check_numbers()
        with handled_signals(name), shown_log():
            return commands[name](arguments)
    except (KeyboardInterrupt, Stopped):
        print("\nInterrupted.", file=sys.stderr)
        return stop.exit_status
    except RLVLMError as error:
        _print_failure(f"{name} {' '.join(arguments)}", error)
        return 2


def _run_command(name: str, config: RunConfig, options: argparse.Namespace) -> int:
    """Run the command and return its status. After Ctrl-C or SIGTERM, say how to continue and return 130 or 143."""
    try:
        return COMMANDS[name](config, options) or 0
    except (KeyboardInterrupt, Stopped):
        if is_first_process():
            print(f"\n{_interruption(name, config)}", file=sys.stderr)
        return stop.exit_status


def _interruption(name: str, config: RunConfig) -> str:
    """Return the message after an interruption: which results are kept, and how to continue."""
    if name == "eval":
        folder = os.path.join(config.train.output_dir, "evaluation")
        return f"Interrupted. Finished samples are kept in {folder}; the same command continues with the others."
    if name != "train" or "rl_vlm.run.run" not in sys.modules:  # the import itself was interrupted
        return "Interrupted."
    from rl_vlm.log.outcome import interrupted_training

    return interrupted_training(config.train.output_dir)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"rl-vlm {name}",
        usage=f"rl-vlm {name} [-h [SECTION]] CONFIG [KEY=VALUE ...]",
        description=COMMANDS[name].__doc__,
        add_help=False,
    )
    add_help(parser)
    parser.add_argument("config", metavar="CONFIG", help="YAML file: sections, or flat keys as in TRL")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="setting that wins over CONFIG's, as in train.max_steps=10",
    )
    if name not in ("plan", "doctor", "launch"):  # these start no run
        parser.usage = f"{parser.usage} [--dry-run]"
        parser.add_argument(
            "--dry-run", action="store_true", help="print all settings, run the checks that need no model, and stop"
        )
    if name in FLAGS:
        FLAGS[name](parser)
    return parser


def _show(description: str, problems: Sequence[str]) -> None:
    """Print a description. Raises ConfigError with the problems, if there are any."""
    _print(description)
    if problems:
        raise ConfigError("\n".join(problems))


def _print_failure(command: str, error: RLVLMError) -> None:
    print(without_secrets(f"rl-vlm {command} failed:\n{error}"), file=sys.stderr, flush=True)


def _print(text: str) -> None:
    if is_first_process():
        print(text, end="")
