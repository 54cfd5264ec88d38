"""From the config to models: the policy with its trainable weights, and the reference it is held to.

A checkpoint is a transformers model, or a PEFT adapter that names one. Weights are loaded strictly: a missing or
unexpected tensor is an error, since a model that starts from random weights looks like one that does not learn.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_vlm.config.schema import MemoryConfig, ModelConfig, RunConfig
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.families import family_of
from rl_vlm.functions import find_function
from rl_vlm.policy import Policy, base_model
from rl_vlm.shared_prefix import enable_shared_rows
from rl_vlm.types import MicroBatch, TokenScores
from rl_vlm.vision import VisionEncoder, use_linear_patches

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, ProcessorMixin

    from rl_vlm.engine import Engine

ADAPTER_CONFIG = "adapter_config.json"
INITIAL_ADAPTER = "initial"
SHAREABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that are a softmax over keys under a mask on relative positions."""


def load_policy(config: RunConfig, initial: str, weights: Path | None = None) -> Policy:
    """The policy with its trainable parameters marked.

    `initial` is the checkpoint that the run starts from; `weights`, when a run goes on, is its own checkpoint.
    Raises ModelError for missing or unexpected weights and for families that are not supported.
    """
    model = load_model(initial, weights, config.model)
    transformer = base_model(model)
    family = family_of(transformer.config)
    if config.model.freeze_vision_tower:
        for parameter in family.vision_parameters(transformer):
            parameter.requires_grad_(False)
    if config.model.attn_implementation == "sdpa" and not family.hybrid:
        enable_shared_rows(transformer)
    use_linear_patches(transformer)
    if config.memory.gradient_checkpointing:
        transformer.gradient_checkpointing_enable({"use_reentrant": False})
        transformer.disable_input_require_grads()  # for reentrant checkpointing; would train through a frozen tower
    refuse_unshareable(transformer, config.memory, config.model)

    compute_dtype = getattr(torch, config.model.dtype)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(compute_dtype)
    return Policy(model, family, config.rollout.temperature, compute_dtype)


def load_model(initial: str, weights: Path | None, config: ModelConfig) -> PreTrainedModel | PeftModel:
    """The bare model for a run that starts from `initial` and goes on from `weights`."""
    source = str(weights or initial)
    if is_adapter(source):
        model = load_adapter(load_transformer(base_of(source), config), source)
        check_adapter_settings(model.peft_config["default"], config, source)
        return model
    model = load_transformer(source, config)
    return add_lora(model, config) if config.use_peft else model


def base_of(source: str) -> str:
    """The model that a PEFT adapter names as its base, or the checkpoint itself where it is no adapter."""
    if not is_adapter(source):
        return source
    return json.loads((Path(source) / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]


def adapter_rank(source: str) -> int | None:
    """The rank of a PEFT adapter; None where the checkpoint is no adapter."""
    return json.loads((Path(source) / ADAPTER_CONFIG).read_text())["r"] if is_adapter(source) else None


def is_adapter(source: str) -> bool:
    """Whether a checkpoint directory holds a PEFT adapter."""
    return (Path(source) / ADAPTER_CONFIG).is_file()


def load_transformer(source: str, config: ModelConfig) -> PreTrainedModel:
    """A transformers model in float32 with every weight accounted for."""
    from transformers import AutoModelForImageTextToText

    # sdpa is what a model takes by itself in every part that has it; GOT-OCR2 refuses to be asked for it by name
    attention = None if config.attn_implementation == "sdpa" else config.attn_implementation
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        source,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        attn_implementation=attention,
        dtype=torch.float32,
        output_loading_info=True,
    )
    model, info = loaded
    check_keys(source, info["missing_keys"], info["unexpected_keys"] | set(info["mismatched_keys"]))
    return model


def check_keys(source: str, missing: set[str], unexpected: set[str]) -> None:
    """Raises ModelError that names a few of the tensors that do not fit."""
    for kind, keys in (("does not have", missing), ("has, and the model has no place for,", unexpected)):
        if keys:
            names = ", ".join(sorted(map(str, keys))[:5])
            raise ModelError(f"{source} {kind} {len(keys)} tensors ({names}, …); refusing to go on with random weights")


def add_lora(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    """A new adapter on the model; the vision tower and its projector get none unless the config says so."""
    from peft import get_peft_model

    return get_peft_model(model, lora_config(model, config))


def lora_config(model: PreTrainedModel, config: ModelConfig) -> LoraConfig:
    from peft import LoraConfig

    vision = "|".join(name.replace(".", r"\.") for name in family_of(model.config).vision_modules)
    excluded = config.lora_exclude_modules
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=config.lora_target_modules,
        exclude_modules=rf"({vision})\..*" if excluded is None else excluded,
        init_lora_weights=config.init_lora_weights,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )


def load_adapter(model: PreTrainedModel, source: str) -> PeftModel:
    """The adapter of a checkpoint, trainable, with every weight accounted for."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    peft_model = PeftModel.from_pretrained(model, source, is_trainable=True)
    stored = load_file(Path(source) / "adapter_model.safetensors").keys()
    expected = get_peft_model_state_dict(peft_model).keys()
    check_keys(source, expected - stored, stored - expected)
    dropout = getattr(peft_model.peft_config["default"], "lora_dropout", 0.0)
    if dropout > 0:
        raise ModelError(
            f"the adapter {source} was made with lora_dropout {dropout}; dropout is not supported, set it to 0"
        )
    return peft_model


def check_adapter_settings(adapter: Any, config: ModelConfig, source: str) -> None:
    """Raises ConfigError where settings of an adapter are asked for that the checkpoint's own adapter does not have."""
    own = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha, "use_rslora": adapter.use_rslora}
    for name, value in own.items():
        if config.use_peft and getattr(config, name) != value:
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}, and the adapter {source} has {value}: set it to that, or "
                "use_peft to false to take the adapter as it is"
            )


def refuse_unshareable(model: PreTrainedModel, memory: MemoryConfig, config: ModelConfig) -> None:
    """Raises ConfigError where `prefix_sharing: shared` cannot be exact; `auto` falls back to the dense path."""
    reason = why_not_shared(model)
    if memory.prefix_sharing == "shared" and reason:
        raise ConfigError(f"memory.prefix_sharing: shared is not possible: {reason}; use auto or dense")


def why_not_shared(model: PreTrainedModel) -> str | None:
    """Why this model cannot share prefixes exactly, or None if it can."""
    if family_of(model.config).hybrid:
        return "some layers carry a state from token to token, which would cross completions"
    text = model.config.get_text_config()
    if text._attn_implementation != "group_shared":
        return "model.attn_implementation is not sdpa"
    if getattr(text, "attention_dropout", 0) > 0:
        return f"the checkpoint has attention_dropout {text.attention_dropout}, which a shared row cannot repeat"
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.get_decoder().modules()):
        return "the checkpoint has dropout in its language model, which a shared row cannot repeat"
    unknown = set(getattr(text, "layer_types", None) or ()) - SHAREABLE_LAYERS
    if unknown:
        return f"the checkpoint has {', '.join(sorted(unknown))} layers, which nobody has checked"
    return None


class Reference:
    """The frozen model of the KL term: the run's initial weights, whatever checkpoint the policy went on from."""

    def __init__(self, policy: Policy, frozen: Policy | None) -> None:
        """`frozen` is a copy of its own; None means the policy's base or initial adapter."""
        self.policy = policy
        self.frozen = frozen

    @property
    def vision(self) -> VisionEncoder:
        return (self.frozen or self.policy).vision

    @torch.no_grad()
    def __call__(self, batch: MicroBatch, num_vision_calls: int = 0) -> TokenScores:
        """Score a micro-batch under the reference."""
        if self.frozen is not None:
            return self.frozen(batch, num_vision_calls)
        with self.initial_adapter():
            return self.policy(batch, num_vision_calls)

    @contextmanager
    def initial_adapter(self) -> Iterator[None]:
        """Inside, the policy is the initial one: its first adapter, or none if the run began without."""
        model = self.policy.model
        if INITIAL_ADAPTER not in model.peft_config:
            with model.disable_adapter():
                yield
            return
        model.set_adapter(INITIAL_ADAPTER, inference_mode=True)
        try:
            yield
        finally:
            model.set_adapter("default")

    @torch.no_grad()
    def move_towards_policy(self, alpha: float) -> None:
        """`reference = alpha * policy + (1 - alpha) * reference` (TR-DPO, arXiv:2404.09656)."""
        assert self.frozen is not None, "the config refuses sync_ref_model with adapters"
        for frozen, trained in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            frozen.lerp_(trained.to(frozen.dtype), alpha)


def load_reference(config: RunConfig, initial: str, policy: Policy, resumed: Path | None) -> Reference | None:
    """The reference, or None when `beta` is 0. A moving one goes on from where the checkpoint left it."""
    if config.algorithm.beta == 0:
        return None
    if config.algorithm.sync_ref_model and is_adapter(initial):
        raise ConfigError(
            f"algorithm.sync_ref_model: the reference of an adapter ({initial}) cannot move; set it to false"
        )
    if is_adapter(initial):
        policy.model.load_adapter(initial, adapter_name=INITIAL_ADAPTER, is_trainable=False)
    if config.model.use_peft or is_adapter(initial):
        return Reference(policy, frozen=None)
    weights = resumed / "reference" if resumed and config.algorithm.sync_ref_model else None
    frozen = load_policy(config, initial, weights).requires_grad_(False).eval().to(policy.device)
    frozen.counters = frozen.vision.counters = policy.counters
    if policy.vision.is_frozen:
        frozen.vision.features = policy.vision.features  # the same weights: an image's features serve both
    return Reference(policy, frozen)


def initial_checkpoint(config: RunConfig, engine: Engine) -> str:
    """The checkpoint that the run starts from; one that a `module:function` makes is kept in the run directory."""
    name = config.model.model_name_or_path
    if not re.fullmatch(r"[\w.]+:\w+", name):
        return name
    directory = Path(config.train.output_dir) / "initial_model"
    engine.together(lambda: make_initial_model(name, config.train.seed, directory) if engine.is_main else None)
    return str(directory)


def make_initial_model(name: str, seed: int, directory: Path) -> None:
    """Call the function `name`, unless the directory holds what it made from the same seed."""
    origin, maker = directory / "made_by.json", {"function": name, "seed": seed}
    if origin.is_file() and json.loads(origin.read_text()) == maker:
        return
    unfinished = directory.with_name("unfinished-initial_model")
    for leftover in (unfinished, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    find_function(name, ModelError)(unfinished, seed)
    (unfinished / origin.name).write_text(json.dumps(maker))
    unfinished.rename(directory)


def save_policy(policy: Policy, processor: ProcessorMixin, directory: Path) -> None:
    """The model, or the trained adapter alone, and its processor, as `from_pretrained` reads them."""
    if policy.model is policy.transformer:
        policy.model.save_pretrained(directory)
    else:
        policy.model.save_pretrained(directory, selected_adapters=["default"])
    processor.save_pretrained(directory)


def load_weights(policy: Policy, source: str, config: ModelConfig) -> None:
    """Bring the policy's weights back to those of a checkpoint of its own run."""
    weights = load_model(source, None, config).state_dict()
    result = policy.model.load_state_dict(weights, strict=False)
    missing = {name for name in result.missing_keys if f".{INITIAL_ADAPTER}." not in name}
    check_keys(source, missing, set(result.unexpected_keys))
