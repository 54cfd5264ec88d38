"""`rl-vlm plan`: which memory a run needs, on hardware that need not be here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from launch.help import path
from rl_vlm.config import yaml_text
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError

ENGINES = (
    "ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload_optimizer",
    "zero3_offload_param", "zero3_offload", "fsdp2",
)  # fmt: skip
PLANNED_LAUNCHES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
"""Values of `distributed_type` in a file for `accelerate launch`."""


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan that are not settings of a run."""
    parser.usage = (
        f"{parser.usage} [--gpus N] [--gpu-memory SIZE] [--nodes M] [--engine NAME] [--config_file FILE] [--suggest] "
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
    parser.add_argument(
        "--engine", choices=ENGINES, help="how ranks hold the model; default: that of --config_file, or ddp"
    )
    parser.add_argument("--config_file", type=path, metavar="FILE", help="the file for `accelerate launch`")
    parser.add_argument(
        "--suggest", action="store_true", help="find the fastest set-up that fits, and what each saving costs"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/memory.md has its keys")
    parser.add_argument("--picture", type=path, metavar="FILE", help="draw the phases as stacked bars, in a PNG file")


def plan_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Show the memory that a run needs, by phase, on hardware that need not be here."""
    if options.picture:
        from rl_vlm.plan.picture import check_picture

        check_picture(options.picture)
    hardware = planned_hardware(options)
    from rl_vlm.plan.build import inspect_model, plan_memory
    from rl_vlm.plan.check import check_setup
    from rl_vlm.plan.report import describe_plan, plan_data, setup_data, setup_table, smallest_table
    from rl_vlm.plan.suggest import Models, setups, smallest

    check_setup(config, hardware.engine, hardware.num_ranks)
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
        print(f"\n{setup_table(suggested)}")
    if not some_fits:
        print(f"\n{smallest_table(fewest_gpus)}")


def planned_hardware(options: argparse.Namespace) -> Any:
    """Return the machines to plan for. Raises ConfigError if an option is out of range or the card is unknown."""
    from rl_vlm.plan.build import Hardware
    from rl_vlm.plan.engines import ENGINES as BY_NAME
    from rl_vlm.plan.hardware import parse_card

    asked = accelerate_file(options.config_file) if options.config_file else {}
    nodes = asked.get("nodes", 1) if options.nodes is None else options.nodes
    gpus = asked.get("gpus", 1) if options.gpus is None else options.gpus
    if gpus < 1 or nodes < 1:
        raise ConfigError("--gpus and --nodes are numbers from 1")
    card = local_card() if options.gpu_memory is None else parse_card(options.gpu_memory)
    engine = BY_NAME[options.engine] if options.engine else asked.get("engine", BY_NAME["ddp"])
    return Hardware(card, gpus, nodes, engine)


def local_card() -> Any:
    """Return this machine's GPU. Raises ConfigError if it has none."""
    import torch

    from rl_vlm.plan.auto import this_card

    if not torch.cuda.is_available():
        raise ConfigError("--gpu-memory is needed, since this machine has no GPU: give a size such as 80GB")
    return this_card(torch.device("cuda", 0))


def accelerate_file(file: Path) -> dict[str, Any]:
    """Return the engine, the number of nodes and that of GPUs of each node of a file for `accelerate launch`.

    Raises ConfigError if the file is not one, or if its launch cannot be planned.
    """
    try:
        asked = yaml_text.parse(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config_file {file} cannot be read: {error}") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"--config_file {file} has no settings: give a file such as launch/accelerate/ddp.yaml")
    kind, nodes, processes = (
        asked.get(key, default)
        for key, default in (("distributed_type", "NO"), ("num_machines", 1), ("num_processes", 1))
    )
    if kind not in PLANNED_LAUNCHES:
        raise ConfigError(
            f"--config_file {file} has distributed_type {kind}, which runs do not support; those that can be planned: "
            f"{', '.join(PLANNED_LAUNCHES)}"
        )
    if not all(isinstance(number, int) and number > 0 for number in (nodes, processes)) or processes % nodes:
        raise ConfigError(
            f"--config_file {file}: num_processes {processes} is the number of all GPUs, and must be a multiple of "
            f"num_machines {nodes}"
        )
    return {"nodes": nodes, "gpus": processes // nodes, "engine": asked_engine(asked)}


def asked_engine(asked: dict[str, Any]) -> Any:
    """Return the engine of a file for `accelerate launch`. Raises ConfigError if it cannot be planned."""
    from rl_vlm.distributed.environment import check_fsdp, deepspeed_config
    from rl_vlm.distributed.zero_config import check_zero
    from rl_vlm.plan.engines import ENGINES as BY_NAME
    from rl_vlm.plan.engines import zero_engine

    if asked.get("distributed_type") == "DEEPSPEED":
        options = section(asked, "deepspeed_config").items()
        names = {f"ACCELERATE_DEEPSPEED_{key.removeprefix('deepspeed_').upper()}": value for key, value in options}
        zero = deepspeed_config(names)["zero_optimization"]
        check_zero(zero)
        return zero_engine(zero)
    if asked.get("distributed_type") == "FSDP":
        check_fsdp({key.upper(): value for key, value in section(asked, "fsdp_config").items()})
        return BY_NAME["fsdp2"]
    return BY_NAME["ddp"]


def section(asked: dict[str, Any], name: str) -> dict[str, str]:
    """Return what `accelerate launch` sets as variables for a section of its file. Raises ConfigError if it is none."""
    options = asked.get(name) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"--config_file: {name} is {options!r}: write it as a section, with `key: value`")
    return {str(key): str(value) for key, value in options.items() if value is not None}
