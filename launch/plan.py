"""`rl-vlm plan`: which memory a run needs, on hardware that need not be here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError

ENGINES = ("ddp", "zero2", "zero3", "zero3_offload", "fsdp2")


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
    parser.add_argument("--config_file", type=Path, metavar="FILE", help="the file for `accelerate launch`")
    parser.add_argument("--suggest", action="store_true", help="find the fastest set-up that fits")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON; docs/memory.md has its keys")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the phases as stacked bars, in a PNG file")


def plan_command(config: RunConfig, options: argparse.Namespace) -> None:
    """Show the memory that a run needs, by phase, on hardware that need not be here."""
    hardware = planned_hardware(options)
    from rl_vlm.plan.build import inspect_model, plan_memory
    from rl_vlm.plan.report import describe_plan, plan_data, setup_data, setup_table
    from rl_vlm.plan.suggest import suggestions

    model = inspect_model(config)
    plan = plan_memory(config, hardware, model)
    setups = suggestions(config, hardware) if options.suggest else []
    if options.picture:
        from rl_vlm.plan.picture import draw_plan

        draw_plan(plan, options.picture)
    if options.json:
        data = plan_data(config, hardware, plan) | ({"setups": [*map(setup_data, setups)]} if setups else {})
        print(json.dumps(data, indent=1))
        return
    print(describe_plan(config, hardware, model, plan))
    if setups:
        print(f"\n{setup_table(setups)}")


def planned_hardware(options: argparse.Namespace) -> Any:
    """Return the machines to plan for. Raises ConfigError if an option is out of range or the card is unknown."""
    from rl_vlm.plan.build import Hardware
    from rl_vlm.plan.engines import ENGINES as BY_NAME
    from rl_vlm.plan.hardware import parse_card

    asked = accelerate_file(options.config_file) if options.config_file else {}
    nodes = asked.get("nodes", 1) if options.nodes is None else options.nodes
    gpus = asked.get("processes", nodes) // nodes if options.gpus is None else options.gpus
    if gpus < 1 or nodes < 1:
        raise ConfigError("--gpus and --nodes are numbers from 1")
    card = parse_card(options.gpu_memory) if options.gpu_memory else local_card()
    return Hardware(card, gpus, nodes, BY_NAME[options.engine or asked.get("engine", "ddp")])


def local_card() -> Any:
    """Return this machine's GPU. Raises ConfigError if it has none."""
    import torch

    from rl_vlm.plan.auto import this_card

    if not torch.cuda.is_available():
        raise ConfigError("--gpu-memory is needed, since this machine has no GPU: give a size such as 80GB")
    return this_card(torch.device("cuda", 0))


def accelerate_file(path: Path) -> dict[str, Any]:
    """Return the engine, the number of nodes and of processes of a file for `accelerate launch`."""
    try:
        asked = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config_file {path} cannot be read: {error}") from error
    found = {"nodes": asked.get("num_machines", 1), "processes": asked.get("num_processes", 1), "engine": "ddp"}
    if asked.get("distributed_type") == "FSDP":
        found["engine"] = "fsdp2"
    if asked.get("distributed_type") == "DEEPSPEED":
        zero = asked.get("deepspeed_config", {})
        offloads = zero.get("offload_optimizer_device", "none") != "none"
        engine = f"zero{zero.get('zero_stage', 2)}" + ("_offload" if offloads else "")
        if engine not in ENGINES:
            raise ConfigError(f"--config_file {path} asks for {engine}: give --engine, one of {', '.join(ENGINES)}")
        found["engine"] = engine
    return found
