"""Set-up of vLLM, shared by the in-process engine and the servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_vlm.config.own_code import class_name
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.images import pixel_limits
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.video.sizes import has_any_size
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model.families import family_of
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.model.remote.code import own_kind
from rl_vlm.model.shared_state import state_layers
from rl_vlm.rollout.vllm.videos import LOADER

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer needs the cores as well
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
"""Defaults of vLLM's environment variables, which the user can override."""

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's environment variable that chooses its model runner."""

ADAPTER_NAME = "policy"

TUNING = "attn_temperature_tuning"
"""The field of Llama 4's config that scales queries by their places."""


def engine_arguments(
    config: RunConfig, model: str, lora_rank: int | None, builder: PromptBuilder | None = None
) -> dict[str, Any]:
    """Build vLLM's engine arguments, by the names of `EngineArgs`.

    `lora_rank` is the rank of the adapters to send. `builder` builds the prompts; without one, they have no videos.
    Raises ConfigError if the checkpoint's own code needs an adapter (`own_kind`), because vLLM has no such adapter.
    """
    vllm, found = config.vllm, read_config(config, model)
    if own_kind(found) is not None:
        raise ConfigError(
            f"rollout.engine: {config.rollout.engine} cannot be used with {class_name(found)}: its own code is reached "
            "by an adapter, and vLLM has other code for its prompts and images. Set rollout.engine: hf"
        )
    arguments = {
        "model": model,
        "revision": config.model.model_revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": config.model.precision,
        "seed": config.train.seed,
        "model_impl": vllm.vllm_model_impl,
        "tensor_parallel_size": vllm.vllm_tensor_parallel_size,
        "gpu_memory_utilization": vllm.vllm_gpu_memory_utilization,
        "enforce_eager": vllm.vllm_enforce_eager,
        "max_num_seqs": config.rollout.max_num_seqs,
        "max_model_len": max_model_length(config),
        "generation_config": "vllm",  # the checkpoint's is not used
        "logprobs_mode": "processed_logprobs",  # after temperature and bans
        "weight_transfer_config": {"backend": weight_transfer(config)},
        "mm_device_do_normalize": False,  # on, EXAONE 4.5 gets pixels of 0 to 255, and videos get images' mean and std
    }
    if "vllm_enable_sleep_mode" in config.rollout.facts.reads:
        arguments["enable_sleep_mode"] = vllm.vllm_enable_sleep_mode
    if lora_rank is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": allowed_lora_rank(lora_rank), "max_loras": 1}
    arguments |= media_arguments(config, found, builder) | model_arguments(config, found)
    return {name: value for name, value in arguments.items() if value is not None}


def model_runner(choice: str) -> dict[str, str]:
    """Return the environment variable for `vllm_model_runner`: none with `auto`.

    Raises ConfigError if the environment chooses another one.
    """
    if choice == "auto":
        return {}
    wanted = {"v1": "0", "v2": "1"}[choice]
    found = os.environ.get(MODEL_RUNNER, wanted)
    if found != wanted:
        raise ConfigError(
            f"vllm.vllm_model_runner: {choice} needs {MODEL_RUNNER}={wanted}, and the environment has {found}; unset it"
        )
    return {MODEL_RUNNER: wanted}


def weight_transfer(config: RunConfig) -> str:
    """Return the backend of vLLM's weight-transfer API that sends weights to servers; `rl_vlm` is ours."""
    vllm = config.vllm
    has_own_gpus = torch.cuda.is_available() and bool(vllm.vllm_server_devices)
    is_nccl = vllm.vllm_weight_transfer == "nccl" or (vllm.vllm_weight_transfer == "auto" and has_own_gpus)
    return "nccl" if is_nccl else "rl_vlm"


def read_config(config: RunConfig, model: str) -> Any:
    """Return a model's config. Raises ModelError if it cannot be read."""
    try:
        return checkpoint_config(model, config.model)
    except (OSError, ValueError) as error:
        raise ModelError(f"No config can be loaded from {model!r}: {error}") from error


def media_arguments(config: RunConfig, found: Any, builder: PromptBuilder | None) -> dict[str, Any]:
    """Return arguments for images and videos of a model with this config.

    Frames of videos have the size that the tower gets, so vLLM's processor must not resize them. A prompt may have as
    many videos as the data's largest row, or as vLLM takes if that is not known. They have no further limits: vLLM
    measures its memory with its own largest video, and limits could only make that one smaller than the run's. One
    batch holds the longest prompt, so that no video is larger than the cache of its features.
    """
    limits = pixel_limits(config.data)
    own = {"images_kwargs": limits} if limits else {}  # for videos they can be too small
    if builder is None or builder.video_format == "frames":
        return {"limit_mm_per_prompt": {"video": 0}, "mm_processor_kwargs": own or None}
    if has_any_size(getattr(builder.processor, "video_processor", None)):
        own |= {"videos_kwargs": {"do_resize": False}}
    most = family_of(found).videos_in_vllm if builder.most_videos is None else builder.most_videos
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"video": most},
        "mm_processor_kwargs": own or None,
        "media_io_kwargs": {"video": {"video_backend": LOADER}},
    }
    return arguments | ({"max_num_batched_tokens": batched_tokens(config)} if most else {})


def model_arguments(config: RunConfig, found: Any) -> dict[str, Any]:
    """Return arguments that depend on the model's config.

    vLLM ignores Llama 4's `attn_temperature_tuning` for rows of up to 32,768 tokens. A generation config overrides
    this, so it gets the value of the model's config.

    On CPUs they include no compilation, which takes minutes, and no chunked prefill. If a prompt is in chunks, vLLM's
    sampler takes back a random number, which CPU generators do not support. Without chunks, vLLM cannot cache prefixes
    of models with stateful layers.
    """
    arguments: dict[str, Any] = {}
    tuned = getattr(found.get_text_config(), TUNING, None)
    if tuned is not None:
        arguments["override_generation_config"] = {TUNING: bool(tuned)}
    if not torch.cuda.is_available():
        arguments |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False if state_layers(found) else None,
            "max_num_batched_tokens": batched_tokens(config),
        }
    return arguments


def keeps_weights(config: RunConfig, sends_adapter: bool, trains_vision: bool) -> bool:
    """Return whether vLLM must keep its weights while it sleeps: unless every weight is sent before each rollout."""
    return sends_adapter or not trains_vision or config.rollout.weight_sync_steps > 1


def max_model_length(config: RunConfig) -> int | None:
    """Return the maximum number of tokens of a prompt and its completion, or None for the model's own limit."""
    prompt = config.data.max_prompt_length
    return config.vllm.vllm_max_model_length or (prompt and prompt + config.rollout.max_completion_length)


def batched_tokens(config: RunConfig) -> int:
    """Return a number of tokens of a batch that holds the longest prompt, if its length is limited."""
    return max(max_model_length(config) or 0, 8192)


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the folder's safetensors files. Raises FileNotFoundError if it has none."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors files in {directory}; trainer and servers must share that folder")
    for path in files:
        yield from load_file(path).items()


def allowed_lora_rank(rank: int) -> int:
    """Return vLLM's smallest limit on LoRA ranks that allows `rank`. Raises ConfigError if no limit does."""
    limits = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    if rank > limits[-1]:
        raise ConfigError(f"model.lora_r {rank} is above {limits[-1]}, vLLM's largest; set rollout.lora_sync: merge")
    return next(limit for limit in limits if limit >= rank)
