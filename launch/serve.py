"""`rl-vlm serve`: start vLLM servers with the settings of a run. A separately started trainer joins them."""

import os
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.help import LOCAL_HOSTS
from rl_vlm.config.engines import READ_BY_STARTED_SERVERS
from rl_vlm.config.schema import RunConfig, VLLMConfig

OPEN_TO_OTHERS = (
    "WARNING: other machines can reach the servers on {host}. Requests need the token, and carry it unencrypted: "
    "let nobody but the trainer's machines into that network."
)


def serve(config: RunConfig, trainer: Sequence[str], host: str, port: int | None) -> None:
    """Start the run's servers on this machine, print how to join them, and wait for Ctrl-C or SIGTERM.

    `trainer` holds the arguments of `rl-vlm train` for these settings. Several servers listen on consecutive ports from
    `port`, or on free ports if it is None. Raises RolloutError with the end of the log if a server ends.
    """
    from rl_vlm.config.precision import with_precision
    from rl_vlm.data.prompts import load_processor
    from rl_vlm.distributed.ranks import Ranks
    from rl_vlm.model.loading import base_of, initial_checkpoint
    from rl_vlm.rollout.build import builder_for
    from rl_vlm.rollout.vllm.arguments import engine_arguments
    from rl_vlm.rollout.vllm.client import TOKEN, VLLMClient
    from rl_vlm.rollout.vllm.process import start_servers, stop_servers, wait_until_healthy

    ranks = Ranks()
    config = with_precision(config, ranks.device.type)
    initial = initial_checkpoint(config, ranks)
    builder = builder_for(load_processor(initial, config.model, config.data), config, initial)
    arguments = engine_arguments(config, base_of(initial), sent_adapter_rank(config, initial), builder)
    token, settings = os.environ.get(TOKEN) or secrets.token_urlsafe(32), config.vllm
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    servers = []
    try:
        servers = start_servers(arguments, settings, token, Path(config.train.output_dir) / "servers", host, port)
        clients = [VLLMClient(server.url, token, settings.vllm_request_timeout) for server in servers]
        wait_until_healthy(servers, clients, settings.vllm_server_timeout)
        print(how_to_join([reachable(server.url) for server in servers], token, trainer, settings), flush=True)
        if host not in LOCAL_HOSTS:
            print(OPEN_TO_OTHERS.format(host=host), file=sys.stderr)
        while True:
            for server in servers:
                server.check_running()
            time.sleep(1)
    except KeyboardInterrupt:
        print("stopping the servers", flush=True)
    finally:
        stop_servers(servers)


def sent_adapter_rank(config: RunConfig, initial: str) -> int | None:
    """Return the rank of the adapter that the run will send, or None if it sends weights."""
    from rl_vlm.config.adapters import adapter_rank

    if config.rollout.lora_sync != "adapter":
        return None
    return adapter_rank(initial) or (config.model.lora_r if config.model.use_peft else None)


def reachable(url: str) -> str:
    """Return the URL for other machines: the host name replaces 0.0.0.0 if the server listens on every interface."""
    return url.replace("//0.0.0.0:", f"//{socket.gethostname()}:")


def how_to_join(urls: Sequence[str], token: str, trainer: Sequence[str], settings: VLLMConfig) -> str:
    """Return the URLs of the servers and the two commands of the trainer's side.

    `trainer` holds the arguments of `rl-vlm train`, and `settings` is their section `vllm`.
    """
    from rl_vlm.rollout.vllm.client import TOKEN

    joins = f"vllm_server_base_url=[{','.join(urls)}]"
    command = shlex.join(["rl-vlm", "train", *joining_words(trainer, settings), joins])
    addresses = "\n".join(f"  {url}" for url in urls)
    return (
        f"vLLM answers at\n{addresses}\nuntil Ctrl-C. On the trainer's side:\n\n  export {TOKEN}={token}\n  {command}\n"
    )


def joining_words(trainer: Sequence[str], settings: VLLMConfig) -> list[str]:
    """Return the arguments of `rl-vlm train` for a trainer that joins servers, without their addresses.

    Leave out the settings that only starting servers read, and unset them if the config has them. Unset
    `vllm_enable_sleep_mode` as well.
    """
    words = [word for word in trainer if word.partition("=")[0].removeprefix("vllm.") not in READ_BY_STARTED_SERVERS]
    unset = [f"{name}=null" for name in READ_BY_STARTED_SERVERS if name in settings.model_fields_set]
    if settings.vllm_enable_sleep_mode:
        unset.append("vllm_enable_sleep_mode=null")
    return [*words, *unset, "rollout.engine=vllm_server"]
