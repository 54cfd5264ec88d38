"""Construction of the configured rollout engine, for training or for evaluation."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import TokenRules
from rl_vlm.model.loading import adapter_rank, base_of, is_adapter, load_policy, longest_prompt
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.rollout.endpoint import MessageBuilder, OpenAIEngine
from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.vllm.arguments import engine_arguments, weight_transfer
from rl_vlm.rollout.vllm.client import TOKEN, VLLMClient
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.rollout.vllm.process import LOOPBACK, start_servers, stop_servers
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import CheckpointWeights, PolicyWeights

logger = logging.getLogger(__name__)


def training_engine(
    config: RunConfig, initial: str, weights: PolicyWeights, builder: PromptBuilder, ranks: Ranks
) -> RolloutEngine:
    """Build an engine that starts with the weights of `initial` and is sent the policy's.

    Raises ConfigError if vLLM cannot load the adapter, or if there is none to merge.
    """
    policy, tokenizer = weights.policy, builder.processor.tokenizer
    if config.rollout.engine == "hf":
        return HFEngine.for_policy(policy, tokenizer, config.rollout.max_num_seqs)
    if config.rollout.lora_sync == "merge" and not weights.has_adapter:
        raise ConfigError("rollout.lora_sync has no effect without an adapter; leave it out, or set model.use_peft")
    model, rank = policy.transformer, weights.adapter_rank()
    tokens = TokenRules.of(model.config, model.generation_config, tokenizer)
    arguments = engine_arguments(config, base_of(initial), rank)
    if config.rollout.engine == "vllm":
        adapter = Path(initial) if is_adapter(initial) and rank else None
        return VLLMEngine(arguments | beside_ranks(config, ranks.world_size), tokens, builder, adapter)
    return server_engine(config, arguments, model.config.model_type, tokens, builder, ranks)


def gathering(
    config: RunConfig, engine: RolloutEngine, strategy: Strategy, ranks: Ranks
) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which the engine generates: engine `hf` needs the policy's weights gathered.

    Raises ConfigError if `ds3_gather_for_generation: false` has no effect.
    """
    whole = config.rollout.ds3_gather_for_generation
    if not whole and not strategy.equal_calls:
        raise ConfigError(
            f"rollout.ds3_gather_for_generation: false has no effect with {strategy.name}, where every rank holds all "
            "weights; leave it out"
        )
    if not isinstance(engine, HFEngine):
        return nullcontext
    if whole:
        return strategy.gathered

    @contextmanager
    def layer_by_layer() -> Iterator[None]:
        with strategy.gathered_by_layer(), engine.in_lockstep(ranks):
            yield

    return layer_by_layer


def prompt_builder(config: RunConfig, checkpoint: str) -> PromptBuilder | MessageBuilder:
    """Build the prompt builder: with the checkpoint's processor, or of messages that the endpoint renders."""
    if config.evaluation.endpoint_url is not None:
        return MessageBuilder()
    processor = load_processor(checkpoint, config.model, config.data)
    return PromptBuilder(processor, config.data, longest_prompt(config, checkpoint))


def evaluation_engine(
    config: RunConfig, checkpoint: str, builder: PromptBuilder | MessageBuilder, ranks: Ranks
) -> RolloutEngine:
    """Build an engine that samples from `checkpoint`, or from the endpoint. Close it after use."""
    if isinstance(builder, MessageBuilder):
        return OpenAIEngine(config)
    tokenizer = builder.processor.tokenizer
    if config.rollout.engine == "hf":
        policy = load_policy(config, checkpoint, None).to(ranks.device)
        return HFEngine.for_policy(policy, tokenizer, config.rollout.max_num_seqs)
    from transformers import GenerationConfig

    base, revision = base_of(checkpoint), config.model.model_revision
    model_config = checkpoint_config(base, config.model)
    tokens = TokenRules.of(model_config, GenerationConfig.from_pretrained(base, revision=revision), tokenizer)
    arguments = engine_arguments(config, base, adapter_rank(checkpoint))
    if config.rollout.engine == "vllm":
        adapter = Path(checkpoint) if is_adapter(checkpoint) else None
        local = VLLMEngine(arguments | beside_ranks(config, ranks.world_size), tokens, builder, adapter)
        local.set_version(0)
        return local
    servers = server_engine(config, arguments, model_config.model_type, tokens, builder, ranks)
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


def beside_ranks(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """Return arguments for vLLM in each of the run's processes, with one model per `vllm_tensor_parallel_size` ranks.

    Raises ConfigError if the number of ranks is not a multiple of that.
    """
    size = config.vllm.vllm_tensor_parallel_size
    if num_ranks % size:
        raise ConfigError(
            f"vllm.vllm_tensor_parallel_size {size} with rollout.engine: vllm spreads a model over the run's "
            f"processes, and their number, {num_ranks}, is no multiple of it"
        )
    return {"distributed_executor_backend": "external_launcher"} if num_ranks > 1 else {}


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
            for process, client in zip(processes, clients, strict=False):
                process.wait_until_healthy(client, vllm.vllm_server_timeout)
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
