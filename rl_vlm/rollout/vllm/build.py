"""Construction of the engines that sample with vLLM: in the run's processes, or on servers."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from rl_vlm.config.adapters import adapter_rank
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.setup import refuse_divided_engine
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import TokenRules, family_of
from rl_vlm.model.files import is_adapter
from rl_vlm.model.loading import base_of, token_rules
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.rollout.vllm.arguments import engine_arguments, keeps_weights, weight_transfer
from rl_vlm.rollout.vllm.client import TOKEN, VLLMClient
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.rollout.vllm.process import LOOPBACK, start_servers, stop_servers, wait_until_healthy
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import CheckpointWeights, PolicyWeights, why_not_in_vllm

logger = logging.getLogger(__name__)


def training_engine(
    config: RunConfig, initial: str, weights: PolicyWeights, builder: PromptBuilder, ranks: Ranks
) -> VLLMEngine:
    """Build vLLM in this process. Raises ConfigError if it cannot load the adapter."""
    rank = weights.adapter_rank()
    tokens, arguments = tokens_of(weights, builder), engine_arguments(config, base_of(initial), rank, builder)
    adapter = Path(initial) if is_adapter(initial) and rank else None
    keeps = keeps_weights(config, weights.sends_adapter, trains_vision=not weights.policy.vision.is_frozen)
    arguments |= beside_ranks(config, ranks.world_size)
    engine = VLLMEngine(arguments, tokens, builder, adapter, keeps, config.vllm.vllm_model_runner)
    engine.sleep()  # until the first weights are sent: to gather them takes memory
    return engine


def training_servers(
    config: RunConfig, initial: str, weights: PolicyWeights, builder: PromptBuilder, ranks: Ranks
) -> VLLMServers:
    """Connect to the servers of a run. Raises ConfigError if vLLM cannot load the adapter."""
    rank = weights.adapter_rank()
    tokens, arguments = tokens_of(weights, builder), engine_arguments(config, base_of(initial), rank, builder)
    return server_engine(config, arguments, weights.policy.transformer.config.model_type, tokens, builder, ranks)


def tokens_of(weights: PolicyWeights, builder: PromptBuilder) -> TokenRules:
    """Return the rules for the tokens of the trained model."""
    model = weights.policy.transformer
    return TokenRules.of(model.config, model.generation_config, builder.processor.tokenizer)


def evaluation_engine(config: RunConfig, checkpoint: str, builder: PromptBuilder, ranks: Ranks) -> VLLMEngine:
    """Build vLLM in this process, with the weights of a checkpoint."""
    tokens, arguments, _ = parts_of_checkpoint(config, checkpoint, builder)
    adapter = Path(checkpoint) if is_adapter(checkpoint) else None
    arguments |= beside_ranks(config, ranks.world_size)
    local = VLLMEngine(arguments, tokens, builder, adapter, model_runner=config.vllm.vllm_model_runner)
    local.set_version(0)
    return local


def evaluation_servers(config: RunConfig, checkpoint: str, builder: PromptBuilder, ranks: Ranks) -> VLLMServers:
    """Connect to servers, and send them a checkpoint's weights if they did not start with them."""
    tokens, arguments, model_type = parts_of_checkpoint(config, checkpoint, builder)
    servers = server_engine(config, arguments, model_type, tokens, builder, ranks)
    has_weights = not config.vllm.vllm_server_base_url and not is_adapter(checkpoint)
    try:
        with ranks.agree():
            if has_weights:
                servers.set_version(0)
            else:
                servers.sync(CheckpointWeights(Path(checkpoint), is_adapter(checkpoint)), version=0)
    except BaseException:
        servers.close()
        raise
    return servers


def parts_of_checkpoint(
    config: RunConfig, checkpoint: str, builder: PromptBuilder
) -> tuple[TokenRules, dict[str, Any], str]:
    """Return the rules for tokens, vLLM's arguments and the model type of a checkpoint.

    Raises ConfigError if the checkpoint is an adapter that vLLM cannot load.
    """
    base = base_of(checkpoint)
    tokens = token_rules(config.model, base, builder.processor.tokenizer)
    model_config = checkpoint_config(base, config.model)
    if is_adapter(checkpoint) and (
        reason := why_not_in_vllm(Path(checkpoint), family_of(model_config).vision_prefixes)
    ):
        raise ConfigError(
            f"vLLM cannot load the adapter {checkpoint}: {reason}. Set rollout.engine: hf, or merge it into its base "
            "model with `rl-vlm export --merge`"
        )
    return tokens, engine_arguments(config, base, adapter_rank(checkpoint), builder), model_config.model_type


def beside_ranks(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """Return arguments for vLLM in each of the run's processes. `vllm_tensor_parallel_size` ranks share one model.

    Raises ConfigError if the number of ranks is not a multiple of it.
    """
    refuse_divided_engine(config, num_ranks)
    if num_ranks == 1:
        return {}
    worker = "auto" if torch.cuda.is_available() else "rl_vlm.rollout.vllm.cpu_worker.SharedCPUWorker"
    return {"distributed_executor_backend": "external_launcher", "worker_cls": worker}


def server_engine(
    config: RunConfig, arguments: dict[str, Any], model_type: str, tokens: TokenRules, builder: PromptBuilder,
    ranks: Ranks,
) -> VLLMServers:  # fmt: skip
    """Connect to running servers, or to new ones that the main process starts.

    Raises RolloutError on every rank if a server cannot be started or used.
    """
    vllm, output_dir = config.vllm, Path(config.train.output_dir)
    token, starts = os.environ.get(TOKEN) or secrets.token_urlsafe(32), not vllm.vllm_server_base_url
    logs = output_dir / "servers"
    if starts:
        logger.info("starting %d vLLM servers; their logs are in %s", vllm.vllm_num_servers, logs)
    else:
        logger.info("joining the vLLM servers %s", ", ".join(vllm.vllm_server_base_url))
    with ranks.agree():
        processes = start_servers(arguments, vllm, token, logs, LOOPBACK) if starts and ranks.is_main else []
    urls = vllm.vllm_server_base_url or [process.url for process in processes]
    shared = (urls, token, f"{secrets.token_hex(4)}/")
    ((urls, token, run),) = ranks.gather([shared] if ranks.is_main else [])
    clients = [VLLMClient(url, token, vllm.vllm_request_timeout) for url in urls]
    names = ("dtype", "mm_processor_kwargs", "logprobs_mode", "max_lora_rank")
    expected = {"model_type": model_type} | {name: arguments.get(name) for name in names}
    if vllm.vllm_weight_transfer != "auto":
        expected["weight_transfer"] = weight_transfer(config)
    try:
        with ranks.agree():
            if processes:
                wait_until_healthy(processes, clients, vllm.vllm_server_timeout)
            for client in () if starts else clients:
                client.wait_until_up(vllm.vllm_server_timeout)
        with ranks.agree():
            return VLLMServers(
                clients, tokens, builder, output_dir / "weight_sync", ranks.is_main, expected,
                config.rollout.max_num_seqs, run, lambda: stop_servers(processes),
            )  # fmt: skip
    except BaseException:
        stop_servers(processes)
        raise
