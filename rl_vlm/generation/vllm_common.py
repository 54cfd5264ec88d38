"""What vLLM in process and vLLM servers share: how it is set up, asked, and how its answers become groups.

request ─ prompt ids with one placeholder per image, images ─► vLLM, n = G ─► token ids, log-probs, finish reason
        ─ are its prompt ids ours? its weights those of the last sync? ─► Group
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, DataError, RolloutError
from rl_vlm.images import pixel_limits
from rl_vlm.types import Completion, Group, RolloutRequest, Sample, Sampling

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs the cores as well
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
"""What vLLM reads from the environment, where the user has not set it."""

ADAPTER_NAME = "policy"

BANNED_LOGIT = -1e6
"""Added to the logits of placeholder tokens. A list of allowed tokens would be as long as the vocabulary."""


@runtime_checkable
class PromptRenderer(Protocol):
    """What an engine needs of the prompt builder."""

    processor: Any

    def unexpanded_ids(self, sample: Sample) -> list[int]: ...


@dataclass(frozen=True)
class Answer:
    """One completion as vLLM returns it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[str]
    """Of the weights that sampled it, in order."""


def engine_arguments(config: RunConfig, model: str, lora_rank: int | None) -> dict[str, Any]:
    """Arguments of vLLM's engine, by the names of `EngineArgs`; `lora_rank` is that of adapters it will be sent."""
    vllm = config.vllm
    arguments = {
        "model": model,
        "revision": config.model.model_revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.dtype,
        "seed": config.train.seed,
        "model_impl": vllm.vllm_model_impl,
        "tensor_parallel_size": vllm.vllm_tensor_parallel_size,
        "gpu_memory_utilization": vllm.vllm_gpu_memory_utilization,
        "enforce_eager": vllm.vllm_enforce_eager,
        "max_num_seqs": config.rollout.max_num_seqs,
        "max_model_len": max_model_length(config),
        "mm_processor_kwargs": pixel_limits(config.data) or None,
        "generation_config": "vllm",  # nothing is taken from the checkpoint's
        "logprobs_mode": "processed_logprobs",  # after temperature and bans
        "weight_transfer_config": {"backend": weight_transfer(config)},
        "limit_mm_per_prompt": {"video": 0},
    }
    if config.rollout.engine == "vllm":
        arguments["enable_sleep_mode"] = vllm.vllm_enable_sleep_mode
    if lora_rank is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": allowed_lora_rank(lora_rank), "max_loras": 1}
    if not torch.cuda.is_available():
        arguments |= cpu_arguments(arguments["max_model_len"])
    return {name: value for name, value in arguments.items() if value is not None}


def weight_transfer(config: RunConfig) -> str:
    """How weights reach a server, by the name of a backend of vLLM's weight-transfer API; `rl_vlm` is ours."""
    vllm = config.vllm
    has_own_gpus = torch.cuda.is_available() and bool(vllm.vllm_server_devices)
    is_nccl = vllm.vllm_weight_transfer == "nccl" or (vllm.vllm_weight_transfer == "auto" and has_own_gpus)
    return "nccl" if is_nccl else "rl_vlm"


def cpu_arguments(max_model_length: int | None) -> dict[str, Any]:
    """No compilation, which takes minutes, and no prompts cut in chunks: where one is, vLLM's sampler takes back a
    random number, which CPU generators do not support.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_length or 0, 8192),
    }


def max_model_length(config: RunConfig) -> int | None:
    """Tokens of a prompt and its completion together; None leaves it to the model."""
    prompt = config.data.max_prompt_length
    return config.vllm.vllm_max_model_length or (prompt and prompt + config.rollout.max_completion_length)


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the folder's safetensors files. Raises FileNotFoundError if there is none."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors files in {directory}; trainer and servers must share that folder")
    for path in files:
        yield from load_file(path).items()


def allowed_lora_rank(rank: int) -> int:
    """The smallest of vLLM's limits on ranks that holds `rank`. Raises ConfigError above its largest."""
    limits = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    if rank > limits[-1]:
        raise ConfigError(f"model.lora_r {rank} is above {limits[-1]}, vLLM's largest; set rollout.lora_sync: merge")
    return next(limit for limit in limits if limit >= rank)


def sampling_arguments(
    sampling: Sampling, group_id: str, stop_token_ids: Sequence[int], banned_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams` for one group, which can be written as JSON."""
    return {
        "n": sampling.num_generations,
        "max_tokens": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "seed": group_seed(sampling.seed, group_id),
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # the stop tokens are all that end a completion
        "logit_bias": dict.fromkeys(banned_token_ids, BANNED_LOGIT),
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": False,
        "skip_special_tokens": False,
    }


def group_seed(seed: int, group_id: str) -> int:
    """Seed of a group's first completion; vLLM counts up from it. A hash of (run seed, group id), below 2**62."""
    digest = hashlib.blake2b(f"{seed}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def check_length(request: RolloutRequest, sampling: Sampling, limit: int) -> None:
    """Raises DataError if prompt and completion are longer than vLLM was set up for: it would cut the completion."""
    prompt = len(request.prompt.token_ids)
    if prompt + sampling.max_completion_length > limit:
        raise DataError(
            f"Sample {request.prompt.sample.sample_id}: {prompt} prompt tokens and up to "
            f"{sampling.max_completion_length} of a completion are more than vLLM's {limit}. Raise "
            "vllm.vllm_max_model_length, or drop such prompts with data.max_prompt_length."
        )


def to_group(
    request: RolloutRequest,
    prompt_ids: Sequence[int],
    answers: Sequence[Answer],
    version: int,
    tokenizer: Any,
    run: str = "",
) -> Group:
    """The group of vLLM's answers. Raises RolloutError if they are to another prompt, or of other weights."""
    check_prompt_ids(request, prompt_ids)
    found, expected = {v for answer in answers for v in answer.versions}, version_label(version, run)
    if found != {expected}:
        raise RolloutError(
            f"Sample {request.prompt.sample.sample_id} was sampled by weights of version {', '.join(sorted(found))}, "
            f"and the last that were sent are {expected}: another run may use the same server."
        )
    texts = tokenizer.batch_decode(
        [answer.token_ids for answer in answers], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    completions = [to_completion(answer, text) for answer, text in zip(answers, texts, strict=True)]
    return Group(request.group_id, request.prompt, completions, version)


def to_completion(answer: Answer, text: str) -> Completion:
    """Raises RolloutError for a completion that vLLM gave up."""
    if answer.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a completion with finish reason {answer.finish_reason!r}.")
    token_ids = torch.tensor(answer.token_ids)
    return Completion(token_ids, torch.tensor(answer.logprobs), answer.finish_reason, text)


def version_label(version: int, run: str = "") -> str:
    """vLLM labels what it samples with this; `run` tells runs on one server apart."""
    return f"{run}{version}"


def check_prompt_ids(request: RolloutRequest, found: Sequence[int]) -> None:
    """Raises RolloutError where vLLM's processor made other tokens of the prompt and its images than ours."""
    expected = request.prompt.token_ids.tolist()
    if list(found) == expected:
        return
    differs = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), "the end")
    raise RolloutError(
        f"Sample {request.prompt.sample.sample_id}: vLLM reads {len(found)} prompt tokens, the trainer "
        f"{len(expected)}, and they differ from token {differs} on. Model, chat template, and pixel limits "
        "(data.min_pixels, data.max_pixels) must be the same on both sides."
    )
