"""`rl-vlm rewards`: list, show and check reward functions."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from launch.help import filled
from rl_vlm.config.schema import DataConfig, RewardsConfig, RewardSpec, RunConfig
from rl_vlm.errors import ConfigError, RewardError

PAGE = Path(__file__).parents[1] / "docs" / "built_in_rewards.md"
"""Path of the page in a checkout. An installed package has no such page."""


def rewards_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm rewards`."""
    parser = argparse.ArgumentParser(prog="rl-vlm rewards", description="List, show and check reward functions.")
    commands = parser.add_subparsers(dest="action", required=True, metavar="list | show | check")
    commands.add_parser("list", help="print the names of built-in and installed functions")
    show = commands.add_parser("show", help="print what a function does, its columns and its settings")
    show.add_argument("name", type=filled, metavar="NAME", help="built-in name, file.py:function or module:function")
    check = commands.add_parser("check", help="score gold answers and cheats, and say what is wrong")
    check.add_argument(
        "target", type=filled, metavar="CONFIG_OR_FUNCTION", help="a run's YAML file, or the name of a function"
    )
    check.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE",
        help="settings of the run; for a function alone, settings of data, such as image_root=DIR, and of its entry in "
        "reward_funcs, such as kwargs='{method: strict}'",
    )  # fmt: skip
    check.add_argument("--data", type=filled, metavar="NAME", help="data.dataset_name: where rows come from")
    check.add_argument(
        "-n", type=int, default=1000, metavar="N",
        help="maximum number of rows, spread evenly over the data; default: 1000",
    )  # fmt: skip
    check.add_argument(
        "--completions", type=int, default=0, metavar="N",
        help="also sample num_generations completions of N rows from the initial model of CONFIG",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def rewards_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm rewards`, and return the exit status: 1 if a check finds an error, 2 if it checks nothing."""
    options = parse(arguments)
    if options.action == "check":
        return check_functions(options)
    print(list_functions() if options.action == "list" else show_function(options.name))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Overrides may stand between flags."""
    options, rest = rewards_parser().parse_known_args(arguments)
    is_override = [options.action == "check" and "=" in word and not word.startswith("-") for word in rest]
    if not all(is_override):
        rewards_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def list_functions() -> str:
    """Return a line for each built-in, and for each entry point of an installed package."""
    import rl_vlm.reward  # noqa: F401  checks that the next import finds our `rewards`
    from rewards.registry import BUILT_INS
    from rl_vlm.reward.function import ENTRY_POINT_GROUP, missing_packages

    lines, topic = [], ""
    for name, function in sorted(BUILT_INS.items(), key=lambda item: (item[1].__module__.split(".")[1], item[0])):
        if topic != (topic := function.__module__.split(".")[1]):
            lines.append(f"{topic}:")
        missing = missing_packages(name)
        note = f" (needs {', '.join(missing)}: pip install -e '.[rewards]')" if missing else ""
        lines.append(f"  {name:22}{first_line(function)}{note}")
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    lines += ["installed:", *(f"  {plugin.name:22}{plugin.value}" for plugin in plugins)] if plugins else []
    return "\n".join(lines)


def first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def show_function(name: str) -> str:
    """Describe a function: its columns, its settings, and its part of docs/built_in_rewards.md or else its docstring.

    Raises RewardError if the function cannot be loaded.
    """
    import rl_vlm.reward  # noqa: F401  checks that the next import finds our `rewards`
    from rewards.calling import OFFERED, parameters
    from rewards.registry import BUILT_INS, TIMEOUTS
    from rl_vlm.reward.function import Reward

    reward = Reward(RewardSpec(function=name))
    known = parameters(reward.function)
    columns = [key for key in known if key in reward.columns.difference(OFFERED)]
    settings = {key: p.default for key, p in known.items() if p.kind is p.KEYWORD_ONLY}
    values = ", ".join(f"{key}: {json.dumps(value, default=str)}" for key, value in settings.items())
    lines = [
        reward.name,
        f"  protocol  {reward.system or 'TRL'}",
        f"  columns   {', '.join(columns) or 'none'}",
        f"  offered   {', '.join(key for key in known if key in OFFERED) or 'none'}",
        f"  settings  {values or 'none'}",
    ]
    if name in TIMEOUTS:
        lines.append(f"  timeout   {TIMEOUTS[name]:g} seconds, in a worker process")
    page = section(name) if name in BUILT_INS else None
    return "\n".join([*lines, "", page or inspect.getdoc(reward.function) or "It has no docstring."])


def section(name: str) -> str | None:
    """Return the part of docs/built_in_rewards.md about a built-in, or None if the page is not here."""
    if not PAGE.is_file():
        return None
    found = re.search(rf"^### `{name}`\n\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else None


def check_functions(options: argparse.Namespace) -> int:
    """Check functions on rows, print the report, and return 1 if there is an error.

    Raises RewardError if nothing could be checked.
    """
    data, rewards, run = what_to_check(options)
    from rl_vlm.tools.checks.rewards.findings import examine_functions
    from rl_vlm.tools.checks.rewards.subject import builder_of_videos
    from rl_vlm.tools.checks.rewards.text import describe, reward_data

    builder = builder_of_videos(run) if run else None
    functions, sampled, found = examine_functions(data, rewards, options.n, run, builder, options.completions)
    if not functions and not sampled:
        raise RewardError(
            f"nothing was checked: {'; '.join(found.not_checked)}. --completions N samples and scores completions of "
            "the initial model of CONFIG"
        )
    if options.json:
        print(json.dumps(reward_data(functions, sampled, found), indent=1, default=str))
    else:
        print(describe(functions, sampled, found))
    return int(bool(found.texts("error")))


def what_to_check(options: argparse.Namespace) -> tuple[DataConfig, RewardsConfig, RunConfig | None]:
    """Return the data, the functions and the run of a YAML file, or else `--data`, one function and None.

    Raises ConfigError if an option is out of range, or if the rows are not given.
    """
    if options.n < 1 or options.completions < 0:
        raise ConfigError("-n must be at least 1, and --completions at least 0")
    is_run = Path(options.target).suffix in (".yaml", ".yml")
    if options.completions and not is_run:
        raise ConfigError("--completions applies to a run: give its YAML file instead of a function")
    from rl_vlm.tools.checks.rewards.subject import of_function, of_run

    found = (of_run if is_run else of_function)(options.target, options.overrides, options.data)
    if found[0].dataset_name is None:
        raise ConfigError("--data is needed: give the rows whose gold answers are scored")
    return found
