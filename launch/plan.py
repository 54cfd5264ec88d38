"""`rl-vlm plan`: show the memory that a run needs, on hardware that need not be here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from launch.help import add_sharding, path
from rl_vlm.config import yaml_text
from rl_vlm.config.function_names import names_function
from rl_vlm.config.precision import with_precision
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS, UNSHARDED, Kind, Sharding, kinds, listed_names
from rl_vlm.errors import ConfigError
from rl_vlm.plan.hardware import Card, Hardware, parse_card
from rl_vlm.plan.packaged import config_source


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan that are not settings of a run."""
    parser.usage = (
        f"{parser.usage} [--gpus N] [--gpu-memory SIZE] [--nodes M] [--sharding NAME] [--config_file FILE] [--suggest] "
        "[--json] [--picture FILE]"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs of each node; default: those of --config_file, or 1"
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE",
        help="a card's memory, as on its label (80GB), as it offers (79.1GiB), or a card's name (h100); default: this "
        "machine's card",
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, metavar="M", help="machines; default: those of --config_file, or 1")
    add_sharding(parser, listed_names(), "that of --config_file, or ddp")
    parser.add_argument("--config_file", type=path, metavar="FILE", help="the file for `accelerate launch`")
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="list set-ups, best fit first, with the cost of each saving",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/memory.md has its keys")
    parser.add_argument(
        "--picture",
        type=path,
        metavar="FILE",
        help="draw whether it fits, and the stages as stacked bars, in a PNG, SVG or PDF file",
    )


def plan_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Show the memory that a run needs, by phase, on hardware that need not be here."""
    if options.picture:
        from rl_vlm.plan.picture import check_picture

        check_picture(options.picture)
    hardware = planned_hardware(options)
    if not names_function(config.model.model_name_or_path):
        config_source(config.model.model_name_or_path, config.model.model_revision)  # before the import of torch
    config = with_precision(config, "cuda")
    setup_problems(config, hardware.sharding, hardware.num_ranks).refuse()
    from rl_vlm.plan.build import inspect_model, plan_memory
    from rl_vlm.plan.suggest import Models, setups, smallest
    from rl_vlm.plan.text import describe_plan, plan_data, setup_data, smallest_table, suggested_tables

    model = inspect_model(config)
    plan, models = plan_memory(config, hardware, model), Models(config, model)
    suggested = setups(config, hardware, models) if options.suggest else []
    some_fits = plan.fits or any(each.plan.fits for each in suggested)
    fewest_gpus = [] if some_fits else smallest(config, hardware, models)
    if options.picture:
        from rl_vlm.plan.picture import draw_plan

        draw_plan(plan, options.picture)
    if options.json:
        data = plan_data(config, hardware, model, plan)
        data |= {"setups": [*map(setup_data, suggested)], "smallest": [*map(setup_data, fewest_gpus)]}
        print(json.dumps(data, indent=1))
        return
    print(describe_plan(config, hardware, model, plan))
    if suggested:
        print(f"\n{suggested_tables(suggested, plan)}")
    if not some_fits:
        print(f"\n{smallest_table(fewest_gpus)}")


def planned_hardware(options: argparse.Namespace) -> Hardware:
    """Return the machines to plan for. Raises ConfigError if an option is out of range or the card is unknown."""
    asked = accelerate_file(options.config_file) if options.config_file else {}
    nodes = asked.get("nodes", 1) if options.nodes is None else options.nodes
    gpus = asked.get("gpus", 1) if options.gpus is None else options.gpus
    if gpus < 1 or nodes < 1:
        raise ConfigError("--gpus and --nodes must be at least 1")
    card = local_card() if options.gpu_memory is None else parse_card(options.gpu_memory)
    sharding = SHARDINGS[options.sharding] if options.sharding else asked.get("sharding", UNSHARDED)
    return Hardware(card, gpus, nodes, sharding)


def local_card() -> Card:
    """Return this machine's GPU. Raises ConfigError if it has none."""
    import torch

    from rl_vlm.plan.auto import this_card

    if not torch.cuda.is_available():
        raise ConfigError("--gpu-memory is needed, since this machine has no GPU: give a size such as 80GB")
    return this_card(torch.device("cuda", 0))


def accelerate_file(file: Path) -> dict[str, Any]:
    """Read the sharding, the number of nodes and the number of GPUs per node from a file for `accelerate launch`.

    Raises ConfigError if it is not such a file, or if its launch cannot be planned.
    """
    try:
        asked = yaml_text.parse(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config_file {file} cannot be read: {error}") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"--config_file {file} has no settings: give a file such as launch/accelerate/ddp.yaml")
    asked_type, nodes, processes = (
        asked.get(key, default)
        for key, default in (("distributed_type", "NO"), ("num_machines", 1), ("num_processes", 1))
    )
    planned = {of_accelerate: kind for kind in kinds().values() for of_accelerate in kind.distributed_types}
    if not isinstance(asked_type, str) or asked_type not in planned:
        names = ", ".join(sorted(planned, reverse=True))  # those that shard nothing first
        raise ConfigError(
            f"--config_file {file} has distributed_type {asked_type}, which runs do not support; those that can be "
            f"planned: {names}"
        )
    if not all(isinstance(number, int) and number > 0 for number in (nodes, processes)) or processes % nodes:
        raise ConfigError(
            f"--config_file {file}: num_processes {processes} is the number of all GPUs, and must be a multiple of "
            f"num_machines {nodes}"
        )
    return {"nodes": nodes, "gpus": processes // nodes, "sharding": asked_sharding(asked, planned[asked_type])}


def asked_sharding(asked: dict[str, Any], kind: Kind) -> Sharding:
    """Return the sharding of a file for `accelerate launch`. Raises an error if it cannot be planned."""
    options = {} if kind.section is None else section(asked, kind.section)
    launch = resolve_name(kind.launch)(kind.name, {kind.variable_of(key): value for key, value in options.items()})
    sharding = launch.sharding
    launch.check()
    return sharding


def section(asked: dict[str, Any], name: str) -> dict[str, str]:
    """Return the options of a section as text. Raises ConfigError if the section is not a mapping."""
    options = asked.get(name) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"--config_file: {name} is {options!r}: write it as a section, with `key: value`")
    return {str(key): str(value) for key, value in options.items() if value is not None}
