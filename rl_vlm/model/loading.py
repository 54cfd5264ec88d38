"""Loads models: the policy with its trainable weights, and the checkpoint that it starts from.

A checkpoint is a transformers model, or a PEFT adapter that names one. Weights are loaded strictly: a missing or
unexpected tensor is an error. Otherwise some weights would be random, and the run would just seem not to learn.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
import shutil
from contextlib import chdir, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rl_vlm.config.adapters import base_of
from rl_vlm.config.function_names import names_function
from rl_vlm.config.own_code import has_own_code
from rl_vlm.config.parts import PARTS, as_names, named_parts
from rl_vlm.config.schema import MemoryConfig, ModelConfig, RunConfig
from rl_vlm.distributed.layers import parameters_without_storage, received
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import set_whole
from rl_vlm.errors import ConfigError, ModelError, shorten
from rl_vlm.functions import LoadError, load_function
from rl_vlm.model.dropout import disable_dropout, fix_statistics
from rl_vlm.model.experts import enable_autocast_experts
from rl_vlm.model.families import TokenRules, family_of, video_format
from rl_vlm.model.family import Family
from rl_vlm.model.files import (
    is_adapter,
    refuse_long_completions,
    refuse_unread_revision,
    warn_of_moving_code,
)
from rl_vlm.model.lora import adapter_targets, check_adapter_settings, check_module_names, targeted_layers
from rl_vlm.model.policy import Policy, base_model
from rl_vlm.model.quantization import checkpoint_config, is_in_4bit, keep_format, load_in_4bit, refuse_quantized
from rl_vlm.model.recomputation import enable_recomputation
from rl_vlm.model.remote.code import create, model_class
from rl_vlm.model.shared_prefix import enable_shared_rows, routes_attention
from rl_vlm.model.shared_state import STATE_LAYERS, cannot_share_states, enable_shared_states
from rl_vlm.model.trainable import freeze_untrained
from rl_vlm.model.vision import FeatureCache, use_linear_patches
from rl_vlm.model.windows import enable_batched_windows
from rl_vlm.types import Prompt, Sharing, VideoFormat

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

INITIAL_ADAPTER = "initial"
SHAREABLE_LAYERS = {"full_attention", "sliding_attention", *STATE_LAYERS}
"""Layer types that allow sharing: softmax over keys that are masked by relative position, or a shareable state."""


def load_policy(
    config: RunConfig,
    initial: str,
    weights: Path | None = None,
    idle_prompt: Prompt | None = None,
    features: FeatureCache | None = None,
    empty: bool = False,
) -> Policy:
    """Load the policy and mark its trainable parameters.

    `initial` is the checkpoint that the run starts from. `weights` is the run's own checkpoint if it is resumed. With
    `empty`, weights are on the meta device, and another rank sends them. The other arguments are passed to `Policy`.
    Raises ModelError if weights are missing or unexpected, or if the family is not supported.
    """
    model = load_model(initial, weights, config.model, empty)
    disable_dropout(model)
    fix_statistics(model)
    transformer = base_model(model)
    family = family_of(transformer.config)
    refuse_unproven(family, config.model)
    freeze_untrained(model, transformer, family, config.model)
    if config.model.attn_implementation == "sdpa":
        if not unshareable_layers(transformer.config):  # some check for the name `sdpa`
            enable_shared_rows(transformer, config.memory.shared_attention)
            enable_shared_states(transformer)
        enable_batched_windows(transformer, family)
    enable_autocast_experts(transformer)
    use_linear_patches(transformer)
    enable_recomputation(transformer, family, config.memory)
    refuse_unshareable(transformer, config.memory)

    dtype = compute_dtype(config.model)
    for parameter in model.parameters():
        if not parameter.requires_grad and not is_in_4bit(parameter):
            parameter.data = parameter.data.to(dtype)
    offloads = config.memory.activation_offloading
    fused = config.model.fused == "auto"
    return Policy(model, family, config.rollout.temperature, dtype, idle_prompt, features, offloads, fused)


def token_rules(model: ModelConfig, checkpoint: str, tokenizer: Any) -> TokenRules:
    """Return the stop tokens and the banned tokens of a checkpoint's model."""
    from transformers import GenerationConfig

    config = checkpoint_config(checkpoint, model)
    try:
        generation = GenerationConfig.from_pretrained(checkpoint, revision=model.model_revision)
    except OSError:  # the checkpoint has none
        generation = GenerationConfig.from_model_config(config)
    return TokenRules.of(config, generation, tokenizer)


def longest_prompt(config: RunConfig, checkpoint: str) -> int | None:
    """Return the maximum number of prompt tokens that leave room for a completion, or None without a limit.

    Raises ConfigError if completions leave no room for a prompt.
    """
    context, completion = context_length(config.model, checkpoint), config.rollout.max_completion_length
    refuse_long_completions(completion, context)
    return None if context is None else context - completion


def native_or_frames(config: RunConfig, checkpoint: str, most_videos: int | None = None) -> VideoFormat:
    """Return how the model of a checkpoint gets videos. vLLM gets their frames as images if the family's row says so.

    `most_videos` is the largest number of videos in a prompt, if it is known. Raises ConfigError if the model or the
    engine does not take the format, or so many videos.
    """
    found, engine = checkpoint_config(base_of(checkpoint), config.model), config.rollout.engine
    form = video_format(found, config.data.video_format)
    if form == "frames" or config.rollout.facts.samples_from_policy:
        return form
    most = 0 if config.vllm.vllm_model_impl == "transformers" else family_of(found).videos_in_vllm
    if most == 0:
        if config.data.video_format == "native":
            raise ConfigError(
                f"data.video_format: native cannot be used with rollout.engine {engine} and this {found.model_type}: "
                "vLLM's model has not been shown to read videos as the trainer does. Use auto or frames, with which "
                "frames are images, or rollout.engine: hf"
            )
        return "frames"
    if most_videos is not None and most_videos > most:
        raise ConfigError(
            f"rollout.engine: {engine} takes {most} video in a prompt of {found.model_type}, and the data has a row "
            f"with {most_videos}. Set data.video_format: frames, with which frames are images, or rollout.engine: hf"
        )
    return "native"


def context_length(config: ModelConfig, checkpoint: str) -> int | None:
    """Return the maximum number of tokens of prompt and completion, or None if the model's config has no limit."""
    found = checkpoint_config(base_of(checkpoint), config)
    return getattr(found.get_text_config(), "max_position_embeddings", None)


def load_model(
    initial: str, weights: Path | None, config: ModelConfig, empty: bool = False
) -> PreTrainedModel | PeftModel:
    """Load the transformers or PEFT model from `weights` if the run is resumed, else from `initial`.

    The base model of an adapter is loaded in the compute precision, since it is not trained.
    """
    source, load = str(weights or initial), empty_transformer if empty else load_transformer
    refuse_quantized(base_of(source), config)
    if is_adapter(source):
        base = load(base_of(source), config, compute_dtype(config))
        by_part = config.use_peft and bool(named_parts(config.lora_target_modules))
        wanted = targeted_layers(base, lora_config(base, config)) if by_part else None
        model = load_adapter(base, source, config)
        check_adapter_settings(model, config, source, wanted)
        return model
    if config.use_peft:
        return add_lora(load(source, config, compute_dtype(config)), config)
    return load(source, config)


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype of the computation, and of weights that are not trained."""
    return getattr(torch, config.precision)


def load_transformer(source: str, config: ModelConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a transformers model in `dtype`, or in 4 bits for QLoRA. Raises ModelError if its weights do not match."""
    arguments = creation(config, dtype) | (load_in_4bit(source, config) if config.load_in_4bit else {})
    found = checkpoint_config(source, config)
    loaded: Any = model_class(found, config.trust_remote_code).from_pretrained(
        source, config=found, revision=config.model_revision, output_loading_info=True, **arguments
    )
    model, info = loaded
    check_keys(source, info["missing_keys"], info["unexpected_keys"] | set(info["mismatched_keys"]))
    keep_format(model)
    return model


def empty_transformer(source: str, config: ModelConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Create the same model as `load_transformer`, with parameters on the meta device, which needs no memory."""
    from transformers import GenerationConfig

    found = checkpoint_config(source, config)
    with parameters_without_storage():
        model = create(found, config.trust_remote_code, **creation(config, dtype))
    model.tie_weights()  # on the meta device each use of a tied weight got a separate parameter
    with suppress(OSError):  # the checkpoint may have none
        model.generation_config = GenerationConfig.from_pretrained(source, revision=config.model_revision)
    return model


def share_weight_names(model: Any, ranks: Ranks) -> None:
    """Share the names of weights in checkpoints with all ranks. transformers finds them only on the reading rank."""
    (model._weight_conversions,) = ranks.gather([getattr(model, "_weight_conversions", None)] if ranks.is_main else [])


def creation(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments for creating models."""
    # By default a model uses sdpa in every part that supports it. GOT-OCR2 raises an error if sdpa is named.
    attention = None if config.attn_implementation == "sdpa" else config.attn_implementation
    return {"attn_implementation": attention, "dtype": dtype}


def check_keys(source: str, missing: set[str], unexpected: set[str]) -> None:
    """Raise ModelError if any tensor is missing or unexpected. The message names up to five of them."""
    for kind, keys in (("does not have", missing), ("has, and the model has no place for,", unexpected)):
        if keys:
            names = ", ".join(sorted(map(str, keys))[:5])
            raise ModelError(f"{source} {kind} {len(keys)} tensors ({names}, …); they would start from random values")


def add_lora(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    """Add a new adapter to the model. It leaves out the vision tower and its projector, unless the settings name parts.

    Raises ConfigError if a setting names modules that are missing or cannot get an adapter.
    """
    from peft import get_peft_model

    from rl_vlm.model.lora_linear import with_lora_linear

    paths = [path for path, _ in model.named_modules()]
    check_module_names("lora_target_modules", as_names(config.lora_target_modules), paths, PARTS)
    check_module_names("lora_exclude_modules", config.lora_exclude_modules, paths)
    try:
        return get_peft_model(model, with_lora_linear(lora_config(model, config), config.load_in_4bit))
    except ValueError as error:  # a module is not a linear layer, or all targets are excluded
        raise ConfigError(
            f"model.lora_target_modules {config.lora_target_modules!r} cannot be used: {shorten(error)}"
        ) from error


def lora_config(model: PreTrainedModel, config: ModelConfig) -> LoraConfig:
    from peft import LoraConfig

    family, excluded = family_of(model.config), config.lora_exclude_modules
    if excluded is None:
        apart = [] if named_parts(config.lora_target_modules) else family.vision_modules
        # PEFT shortens the names of a model with experts, and takes a layer `layers.0` for a module `mlp.0`
        # (Qwen3-Omni). A router can be a linear layer that returns two tensors (Llama 4).
        anywhere = [*(rf"{re.escape(name)}\..*" for name in family.other_modules), r"layers\.\d+", "router"]
        excluded = "|".join([*(rf"{re.escape(name)}\..*" for name in apart), rf"(.*\.)?({'|'.join(anywhere)})"])
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=adapter_targets(model, family, config.lora_target_modules),
        exclude_modules=excluded,
        init_lora_weights=config.init_lora_weights,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )


def load_adapter(model: PreTrainedModel, source: str, config: ModelConfig) -> PeftModel:
    """Load a checkpoint's adapter as trainable. Raises ModelError if its weights do not match."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    from rl_vlm.model.lora_linear import with_lora_linear

    adapter = with_lora_linear(PeftConfig.from_pretrained(source), config.load_in_4bit)
    peft_model = PeftModel.from_pretrained(model, source, is_trainable=True, config=adapter)
    stored = load_file(Path(source) / "adapter_model.safetensors").keys()
    expected = get_peft_model_state_dict(peft_model, save_embedding_layers=False).keys()
    of_base = get_peft_model_state_dict(peft_model).keys() - expected  # embeddings, which PEFT stores by default
    check_keys(source, expected - stored, stored - expected - of_base)
    return peft_model


def refuse_unshareable(model: PreTrainedModel, memory: MemoryConfig) -> None:
    """Raise ConfigError if `prefix_sharing: shared` cannot be exact. `auto` falls back to the dense path."""
    reason = why_not_shared(model)
    if memory.prefix_sharing == "shared" and reason:
        raise ConfigError(f"memory.prefix_sharing: shared is not possible: {reason}; use auto or dense")


def refuse_unproven(family: Family, config: ModelConfig) -> None:
    """Raise ConfigError if nothing says whether the model's rows are right."""
    if family.is_derived and config.verify == "off":
        raise ConfigError(
            f"model.verify: off is not possible for model_type {family.model_type!r}. It has no row in the table of "
            "families, so only the checks at the start say whether its rows are right: use auto or full"
        )


def usable_sharing(model: PreTrainedModel, wanted: Sharing) -> Sharing:
    """Return `wanted`. If this model cannot share prefixes, log the reason and return `dense`."""
    reason = why_not_shared(model)
    if reason is None:
        return wanted
    logger.warning("prefixes are not shared in training passes: %s", reason)
    return "dense"


def why_not_shared(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot share prefixes exactly, or None if it can."""
    unknown = unshareable_layers(model.config)
    if unknown:
        return f"the checkpoint has {', '.join(sorted(unknown))} layers, for which sharing is not tested"
    if not routes_attention(model):
        own = has_own_code(model.config)
        return "the checkpoint's code has its own attention" if own else "model.attn_implementation is not sdpa"
    if cannot_share_states(model):
        return "the installed transformers computes layers with a state in a new way, which is not tested"
    return None


def unshareable_layers(config: PreTrainedConfig) -> set[str]:
    """Return the types of the language model's layers for which sharing is not tested."""
    found: list[str] = getattr(config.get_text_config(), "layer_types", None) or []
    return set(found) - SHAREABLE_LAYERS


def initial_checkpoint(config: RunConfig, ranks: Ranks) -> str:
    """Return the checkpoint that the run starts from. A `module:function` is called to write it to the run's folder."""
    name = config.model.model_name_or_path
    refuse_unread_revision(config.model)
    warn_of_moving_code(config.model)
    if not names_function(name):
        return name
    directory = Path(config.train.output_dir) / "initial_model"
    with ranks.agree():
        if ranks.is_main:
            make_initial_model(name, config.train.seed, directory)
    return str(directory)


def make_initial_model(name: str, seed: int, directory: Path) -> None:
    """Call the function `name` to write a model, unless the directory holds its model from the same seed and file.

    If the function cannot be loaded any more, its model from the same seed is kept.
    """
    origin, maker = directory / "made_by.json", {"function": name, "seed": seed}
    made = json.loads(origin.read_text()) if origin.is_file() else {}
    try:
        function = load_function(name)
    except LoadError as error:
        if maker.items() <= made.items():
            return
        raise ModelError(f"model.model_name_or_path {name!r}: {error}") from error
    maker["source"] = source_digest(function)
    if made == maker:
        return
    unfinished = directory.with_name("unfinished-initial_model")
    for leftover in (unfinished, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    logger.info("making the model %s", name)
    with chdir("."):  # the function may change the working directory
        function(unfinished, seed)
    (unfinished / origin.name).write_text(json.dumps(maker))
    unfinished.rename(directory)


def source_digest(function: Any) -> str | None:
    """Return a hash of the file that defines a function, or None if there is no such file."""
    try:
        return hashlib.sha256(Path(inspect.getfile(inspect.unwrap(function))).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


@torch.no_grad()
def load_weights(policy: Policy, source: str, config: ModelConfig, empty: bool, ranks: Ranks) -> None:
    """Load an earlier checkpoint of the same run into the policy, at the end of the run.

    The optimizer's copies of the weights do not change. Ranks with `empty` get the weights from rank 0.
    """
    with ranks.agree():
        loaded = dict(load_model(source, None, config, empty).named_parameters())
    present = {n: p for n, p in policy.model.named_parameters() if f".{INITIAL_ADAPTER}." not in n}
    check_keys(source, present.keys() - loaded.keys(), loaded.keys() - present.keys())
    for name, parameter in present.items():
        set_whole(parameter, received(loaded.pop(name), ranks))
