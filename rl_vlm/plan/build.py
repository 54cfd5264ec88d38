"""Make the memory plan of a run from its settings. The planned hardware need not be present."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.data_names import num_draws
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.data.sources import NotOpened
from rl_vlm.data.tables import VIDEO_COLUMNS
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.model.families import family_of
from rl_vlm.model.group_cache import caches_latents
from rl_vlm.model.loading import base_of, make_initial_model, native_or_frames
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.model.vision import num_patches
from rl_vlm.plan.hardware import Card, Hardware
from rl_vlm.plan.memory import KV_CACHE, Load, MemoryPlan, Rollouts
from rl_vlm.plan.observed import observed_images, tokens_per_image
from rl_vlm.plan.packaged import config_source, not_found
from rl_vlm.plan.sharding import buffer_bytes
from rl_vlm.plan.tracing.activations import MOST_TOKENS, Activations, trace_activations
from rl_vlm.plan.tracing.groups import PromptSize, make_prompt, planned_media
from rl_vlm.plan.vllm import ImageSize, VLLMMemory, batched_tokens, hf_cache_bytes, hf_logits_bytes, vllm_memory
from rl_vlm.plan.weights import Weights, count_weights, traceable
from rl_vlm.rollout.vllm.arguments import allowed_lora_rank, keeps_weights
from rl_vlm.stages import Stage
from rl_vlm.types import Prompt, VideoFormat

ASSUMED_PIXELS = 2**20
"""Pixels of an image if `data.max_pixels` is not set."""
ASSUMED_FRAME_PIXELS = 2**18
"""Pixels of a frame of a video if `data.video_max_pixels` is not set."""
OF_VIDEOS = ("fps", "num_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels", "video_root")
"""Settings that only runs with videos set."""
PLANNED_STAGES = (
    Stage.LOAD, Stage.GENERATION, Stage.OLD_LOGPROBS, Stage.REF_LOGPROBS, Stage.ENTROPY, Stage.TRAINING, Stage.UPDATE,
    Stage.WEIGHT_SYNC, Stage.SAVE,
)  # fmt: skip
ASSUMED_TEXT_TOKENS = 256
"""Tokens of a prompt's text if `data.max_prompt_length` is not set."""


@dataclass(frozen=True)
class Model:
    """The model to plan for, with its counted weights and traced activations."""

    config: Any
    """Its transformers config."""
    weights: Weights
    activations: Activations
    prompt_tokens: int
    patches: int
    """Patches of a prompt's images and videos."""
    image_tokens: int = 0
    """Tokens of a prompt's images and videos."""
    num_frames: int = 0
    """Frames of a prompt's video, or 0 if it has an image."""

    @property
    def width(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def image_price(self) -> int:
        """Return the tokens that the image takes from the budget; 0 if the vision tower is frozen."""
        return round(self.activations.patch_price * self.patches) if self.weights.trains_vision else 0


@contextmanager
def config_directory(config: RunConfig) -> Iterator[str]:
    """Yield a directory with the model's config.json, or a name to look up on the hub.

    If the model is named by a function, it is made in a temporary directory. Raises ModelError if the function cannot
    be loaded, and ConfigError like `config_source`.
    """
    name = config.model.model_name_or_path
    if names_function(name):
        with tempfile.TemporaryDirectory() as folder:
            make_initial_model(name, config.train.seed, Path(folder) / "initial_model")
            yield str(Path(folder) / "initial_model")
        return
    yield config_source(name, config.model.model_revision)


def inspect_model(config: RunConfig) -> Model:
    """Count the weights of the configured model, and trace its steps as on a GPU.

    Prompts have the largest size that the settings admit. Raises ConfigError if config.json cannot be found, or if the
    shapes of the family's images are unknown.
    """
    with config_directory(config) as directory:
        found = read_config(config, directory)
        size = prompt_size(config, found, planned_format(config, directory))
        model = traced_model(config, directory, found, make_prompt(found, size), on_gpu=True)
        return replace(model, num_frames=size.num_frames)


def traced_model(config: RunConfig, directory: str, model_config: Any, prompt: Prompt, on_gpu: bool) -> Model:
    """Count the weights of a checkpoint's model, and trace its steps on this prompt."""
    weights = count_weights(config, directory)
    activations = trace_activations(with_built_in_loss(traceable(config)), model_config, prompt, on_gpu)
    activations = replace(activations, fixed=activations.fixed + weights.dequantized_bytes)
    image_tokens = len(family_of(model_config).is_video(model_config, prompt))
    patches = num_patches(model_config, prompt)
    return Model(model_config, weights, activations, len(prompt.token_ids), patches, image_tokens)


def with_built_in_loss(config: RunConfig) -> RunConfig:
    """Replace a user's loss by a built-in one.

    The user's loss may read values, which fake tensors lack. Any loss per token holds little memory.
    """
    algorithm = config.algorithm
    return config.model_copy(
        update={"algorithm": algorithm.model_copy(update={"loss_type": "dapo"} if algorithm.has_own_loss else {})}
    )


def with_weights(config: RunConfig, model: Model) -> Model:
    """Recount the weights of a traced model for `config`. Its activations change only by the dequantized tensor."""
    with config_directory(config) as directory:
        weights = count_weights(config, directory)
    fixed = model.activations.fixed - model.weights.dequantized_bytes + weights.dequantized_bytes
    return replace(model, weights=weights, activations=replace(model.activations, fixed=fixed))


def read_config(config: RunConfig, directory: str) -> Any:
    """Return the transformers config of a checkpoint. Raises ConfigError if there is none."""
    try:
        found = checkpoint_config(base_of(directory), config.model)
    except OSError as error:
        raise ConfigError(not_found(config.model.model_name_or_path, "the hub has no such model for you")) from error
    family_of(found)
    return found


def prompt_size(config: RunConfig, model_config: Any, video_format: VideoFormat = "native") -> PromptSize:
    """Return the size of the largest prompt that the settings admit, with one image, or one video if the data has some.

    If a limit is not set, `ASSUMED_PIXELS`, `ASSUMED_FRAME_PIXELS` or `ASSUMED_TEXT_TOKENS` takes its place. Raises
    ConfigError if the image or video leaves no room for text.
    """
    data = config.data
    size = PromptSize(data.max_pixels or ASSUMED_PIXELS, ASSUMED_TEXT_TOKENS)
    what, lower = f"an image of {size.image_pixels:,} pixels", "data.max_pixels"
    if has_videos(data):
        frames = data.num_frames or data.max_frames
        pixels = min(data.video_max_pixels or ASSUMED_FRAME_PIXELS, (data.video_total_pixels or math.inf) / frames)
        size = PromptSize(int(pixels), ASSUMED_TEXT_TOKENS, frames, video_format)
        what, lower = f"{frames} frames of {size.image_pixels:,} pixels", "data.max_frames or data.video_max_pixels"
    if (longest := data.max_prompt_length) is None:
        return size
    media_tokens = planned_media(model_config, size).num_tokens
    if longest - media_tokens < 1:
        raise ConfigError(
            f"data.max_prompt_length {longest} leaves no room for text beside {what}, with {media_tokens} tokens: "
            f"lower {lower}, or raise max_prompt_length"
        )
    return replace(size, text_tokens=longest - media_tokens)


def planned_format(config: RunConfig, directory: str) -> VideoFormat:
    """Return how the model gets the videos that the plan assumes. If rows have none, environments show them.

    Raises ConfigError like `native_or_frames`.
    """
    rows_are_empty = all(num_draws(entry.name) is not None for entry in data_sources(config.data, "train"))
    by_environments = config.data.text_only or rows_are_empty
    if by_environments and not config.rollout.facts.samples_from_policy:
        return "frames"
    return native_or_frames(config, directory)


def has_videos(data: DataConfig) -> bool:
    """Return whether the settings or the first row of a data file name videos. Data elsewhere is not opened."""
    entries = data_sources(data, "train")
    named = {key for entry in entries for key in entry.columns}
    if named.intersection(VIDEO_COLUMNS) or any(getattr(data, name) is not None for name in OF_VIDEOS):
        return True
    if data.max_frames != DataConfig().max_frames:
        return True
    if not all(Path(entry.name).is_file() for entry in entries):
        return False
    with suppress(DataError, NotOpened):
        rows = load_rows(data, "train", 1)
        return any(rows.parse(part.start).videos for part in rows.parts)
    return False


def plan_memory(config: RunConfig, hardware: Hardware, model: Model) -> MemoryPlan:
    """Combine a traced model and the run's sharding into a memory plan.

    With `micro_batch_tokens: auto`, the plan has the largest micro-batches that fit, up to `MOST_TOKENS`. They hold at
    least one completion, even if that does not fit.
    """
    least = single_completion(config, model)
    tokens = config.memory.micro_batch_tokens
    plan = MemoryPlan(
        card=hardware.card,
        num_ranks=hardware.num_ranks,
        sharding=hardware.sharding,
        optim=config.train.optim,
        weights=model.weights,
        activations=model.activations,
        rollouts=plan_rollouts(config, hardware, model),
        micro_batch_tokens=least if tokens == "auto" else tokens,
        load=micro_batch_load(config, model, least if tokens == "auto" else tokens),
        patches_per_token=frozen_patches_per_token(config, model),
        buffers=buffer_bytes(hardware.sharding, model.weights, hardware.num_ranks, model.width),
        largest_block=gathered_block(hardware, model),
        stages=planned_stages(config, hardware.num_ranks),
    )
    if tokens != "auto":
        return plan
    tokens = max(least, min(plan.largest_tokens, MOST_TOKENS))
    return replace(plan, micro_batch_tokens=tokens, load=micro_batch_load(config, model, tokens))


def micro_batch_load(config: RunConfig, model: Model, tokens: int) -> Load:
    """Return the largest micro-batch under the budget, or one completion if that is larger.

    The budget ignores a frozen vision tower. Its largest load is a budget full of prompts with short completions, or of
    trajectories with many images: the tower runs on all of their images at once. A trained tower's load is the images
    of one trajectory.
    """
    budget, images = max(tokens, single_completion(config, model)), images_together(config, model)
    if not model.weights.trains_vision:
        between = tokens_per_image(config.rollout, model.prompt_tokens, model.image_tokens)
        return Load(budget, model.patches * max(images, budget // between))
    return Load(budget - images * model.image_price, images * model.patches)


def frozen_patches_per_token(config: RunConfig, model: Model) -> float:
    """Return the most patches per token of the budget if the vision tower is frozen; 0 if it is trained."""
    between = tokens_per_image(config.rollout, model.prompt_tokens, model.image_tokens)
    return 0.0 if model.weights.trains_vision else model.patches / between


def images_together(config: RunConfig, model: Model) -> int:
    """Return the images of a prompt and one context of a completion."""
    return 1 + observed_images(config.rollout, model.image_tokens)


def single_completion(config: RunConfig, model: Model) -> int:
    """Return the tokens of a prompt and one completion of the longest length, in one context, with their images."""
    images = images_together(config, model) * model.image_price
    return images + model.prompt_tokens + config.rollout.max_completion_length


def completions_together(config: RunConfig, model: Model, plan: MemoryPlan) -> int:
    """Return how many completions of the longest length fit in a micro-batch with their prompt, up to one group."""
    beside = model.prompt_tokens + model.image_price
    tokens = min(plan.largest_tokens, plan.micro_batch_tokens) - beside
    return min(config.rollout.num_generations, max(1, tokens // (single_completion(config, model) - beside)))


def planned_stages(config: RunConfig, num_ranks: int) -> tuple[Stage, ...]:
    """Return the planned stages that the run has, in order.

    Raises ConfigError if the batch settings have no solution on this number of ranks.
    """
    algorithm = config.algorithm
    absent = {
        Stage.OLD_LOGPROBS: batch_sizes(config, num_ranks).steps_per_window == 1,
        Stage.REF_LOGPROBS: algorithm.beta == 0,
        Stage.ENTROPY: algorithm.top_entropy_quantile == 1,
        Stage.WEIGHT_SYNC: not config.rollout.facts.has_own_weights,
    }
    return tuple(stage for stage in PLANNED_STAGES if not absent.get(stage, False))


def gathered_block(hardware: Hardware, model: Model) -> int:
    """Return the bytes of the largest block of weights that ranks gather to send or save; 0 if they gather none."""
    gathers = hardware.sharding.gathers(hardware.num_ranks)
    return max(model.weights.layer_bytes, model.weights.rest_bytes) if gathers else 0


def plan_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return the memory of the rollout engine on a rank's device."""
    memory = config.rollout.facts.memory
    return Rollouts({}, 0) if memory is None else resolve_name(memory)(config, hardware, model)


def policy_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return the memory of sampling from the trained model itself: caches, logits, and gathered weights.

    With tools, a later turn computes each completion's prompt and tokens so far as a separate prompt. The plan has the
    longest: all tokens but one.
    """
    sampled = config.rollout
    prompt, completion, group = model.prompt_tokens, sampled.max_completion_length, sampled.num_generations
    if sampled.has_tools:
        prompt, completion, group = prompt + completion - 1, 1, 1
    parts = {
        KV_CACHE: hf_cache_bytes(
            model.config, prompt, completion, group, sampled.max_num_seqs,
            shares_prompts=config.model.attn_implementation == "sdpa" and not caches_latents(model.config),
            is_autocast=config.model.precision != "float32",
        ),
        "logits": hf_logits_bytes(model.config, sampled.max_num_seqs),
    }  # fmt: skip
    weights, gathers = model.weights, hardware.sharding.gathers(hardware.num_ranks)
    by_layer = gathers and not sampled.ds3_gather_for_generation
    casts = gathers and hardware.sharding.casts_gathered
    if config.model.precision == "float32":
        parts[KV_CACHE] *= 2
    else:  # autocast keeps its copies of trained weights during a rollout, unless layers are freed, or cast already
        parts["LM head and copies"] = 2 * (weights.largest_trained if by_layer or casts else weights.num_trained)
    if gathers:
        layer, whole = (weights.layer_cast, weights.sent) if casts else (weights.layer_bytes, weights.bytes)
        parts["gathered weights"] = weights.rest_bytes + layer if by_layer else whole
    return Rollouts(parts, 0)


def vllm_rollouts(config: RunConfig, hardware: Hardware, model: Model) -> Rollouts:
    """Return the memory of vLLM on a card that it shares with the trainer.

    vLLM holds its fraction of the card. If it sleeps during training, it then keeps only its CUDA graphs on the card.
    """
    needed, utilization = vllm_needs(config, model, hardware.card), config.vllm.vllm_gpu_memory_utilization
    held = round(utilization * hardware.card.memory)
    sleeps = config.vllm.vllm_enable_sleep_mode
    keeps = sleeps and keeps_weights(config, sends_adapter(config), model.weights.trains_vision)
    cache = needed.cache(hardware.card, utilization)
    return Rollouts(
        {"vLLM": held - cache, KV_CACHE: cache},
        needed.graphs if sleeps else held,  # sleep mode does not free CUDA graphs
        needed.weights if keeps else 0,
        can_start=needed.num_sequences(hardware.card, utilization) > 0,
    )


def sends_adapter(config: RunConfig) -> bool:
    """Return whether vLLM gets the adapter and applies it, instead of merged or full weights."""
    return config.model.use_peft and config.rollout.lora_sync == "adapter"


def vllm_needs(config: RunConfig, model: Model, card: Card) -> VLLMMemory:
    """Return the memory that vLLM needs on one GPU of this kind. Raises ConfigError if it cannot divide the model.

    If `data.max_pixels` is not set, vLLM profiles the largest image of the checkpoint's processor, which is not known
    here, and the prompt's image takes its place.
    """
    return vllm_memory(
        model.config,
        model.weights.num,
        model.weights.num_vision,
        model.prompt_tokens + config.rollout.max_completion_length,
        config.vllm.vllm_tensor_parallel_size,
        batched_tokens(card),
        enforce_eager=config.vllm.vllm_enforce_eager,
        image=ImageSize(model.image_tokens // max(1, model.num_frames), model.patches // max(1, model.num_frames)),
        lora_rank=allowed_lora_rank(config.model.lora_r) if sends_adapter(config) else 0,
    )


def vllm_fractions(config: RunConfig, model: Model, plan: MemoryPlan) -> dict[str, float]:
    """Return values of `vllm_gpu_memory_utilization` for a plan in which vLLM and the trainer share a card.

    `least` is the smallest value for which vLLM's cache holds one sequence of full length, and `enough` the smallest
    for which it holds `max_num_seqs`. `most` is the largest for which the trainer still fits; it is below 0 if the
    trainer does not fit without vLLM.
    """
    needed = vllm_needs(config, model, plan.card)
    free = plan.available - plan.peak.total + plan.rollouts.while_training
    if config.vllm.vllm_enable_sleep_mode:
        free = plan.free_for_vllm
    return {
        "least": needed.utilization(plan.card, 1),
        "enough": needed.utilization(plan.card, config.rollout.max_num_seqs),
        "most": free / plan.card.memory,
    }
