"""`rl-vlm chat`: serve a checkpoint with OpenAI's chat completions, for benchmarks."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from launch.help import LOCAL_HOSTS, add_host, port_or_any
from rl_vlm.config.engines import engines_where
from rl_vlm.errors import ConfigError

if TYPE_CHECKING:
    from rl_vlm.passes.proof import Proof
    from rl_vlm.tools.serving.checkpoint import Served
    from rl_vlm.tools.serving.service import ChatService


def chat_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm chat`."""
    parser = argparse.ArgumentParser(
        prog="rl-vlm chat", description="Serve a checkpoint with OpenAI's chat completions, for benchmarks."
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT",
        help="a run's output_dir, one of its checkpoints, a model's or an adapter's directory, or a name on the hub",
    )  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE",
        help="setting that wins over the run's, as in max_pixels=802816",
    )  # fmt: skip
    in_process = engines_where(lambda engine: engine.shares_device)
    parser.add_argument("--engine", choices=in_process, default="hf", help="what samples; default: hf")
    add_host(parser)
    parser.add_argument(
        "--port", type=port_or_any, default=8000, metavar="PORT",
        help="port to listen on; 0 takes any free port; default: 8000",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in requests; default: CHECKPOINT as written"
    )
    return parser


def chat_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm chat` until Ctrl-C or SIGTERM, and return the exit status: 130 or 143."""
    options = chat_parser().parse_intermixed_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("rl-vlm chat runs in one process; start it without accelerate launch")
    from rl_vlm.passes.allocator import configure_allocator
    from rl_vlm.tools.serving.checkpoint import find_served

    served = find_served(options.checkpoint, options.engine, options.overrides)
    configure_allocator(served.config)
    name = options.served_model_name or options.checkpoint
    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve(served, name, options.host, options.port)
    except KeyboardInterrupt as stop:
        return 128 + stop.args[0]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: Any) -> NoReturn:
    """Raise KeyboardInterrupt with the number of the signal, in the main thread."""
    raise KeyboardInterrupt(number)


def serve(served: Served, name: str, host: str, port: int) -> NoReturn:
    """Load the model and answer requests until an exception. This thread alone runs the model.

    Raises ConfigError if the port cannot be used.
    """
    from rl_vlm.config.precision import with_precision
    from rl_vlm.distributed.ranks import Ranks
    from rl_vlm.log.terminal import hide_bars_of_libraries
    from rl_vlm.tools.serving.build import chat_service, prove_served
    from rl_vlm.tools.serving.server import API_KEY, ChatServer

    hide_bars_of_libraries()
    served = replace(served, config=with_precision(served.config, Ranks().device.type))
    server = ChatServer(host, port, os.environ.get(API_KEY, ""))
    try:
        service = chat_service(served, name)
        try:
            proof = prove_served(served, service)
            server.start(service)
            try:
                print(welcome(served, service, server.url, proof), flush=True)
                if host not in LOCAL_HOSTS and not server.key:
                    warning = f"WARNING: other machines can use the endpoint; set {API_KEY} to require a key"
                    print(warning, file=sys.stderr)
                service.batches.run()
            finally:
                server.stop()
        finally:
            service.batches.engine.close()
    finally:
        server.server_close()


def welcome(served: Served, service: ChatService, url: str, proof: Proof) -> str:
    """Return the first message: the checkpoint, its limits and proof, and the base URL and model name for clients."""
    from rl_vlm.tools.serving.build import limits_in_words

    limits = "".join(f"  {line}\n" for line in limits_in_words(served, service))
    lines = "".join(f"  {check.result:22} {check}\n" for check in proof.checks)
    proven = f"Checks of the model on this device:\n{lines}" if lines else ""
    return (
        f"{served.checkpoint} answers with engine {served.config.rollout.engine} until Ctrl-C. Limits:\n{limits}"
        f"{proven}A client needs:\n  base URL  {url}\n  model     {service.name}"
    )
