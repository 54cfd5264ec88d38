"""Memory of rollouts per GPU, from a model's config: vLLM's weights and KV cache, and the cache of engine `hf`.

vLLM divides the attention heads, the MLPs, the experts and the vocabulary over tensor-parallel GPUs. It repeats norms,
biases of row-parallel layers and patch embeddings. These are below 0.1% of a model, and counted as divided. If there
are more GPUs than KV heads, every GPU holds one whole KV head. A vision tower is divided if the number of GPUs divides
its heads, and repeated otherwise.

Example: Qwen2.5-VL-7B has 28 layers, 4 KV heads of 128 values and 2 bytes per value. A token's keys and values take
2 × 28 × 4 × 128 × 2 = 57,344 bytes. Each of 2 GPUs holds half of it, and each of 8 GPUs a quarter.
"""

import math
from dataclasses import dataclass
from typing import Any

from rl_vlm.errors import ConfigError
from rl_vlm.model.families import head_dim
from rl_vlm.model.group_cache import ROOM
from rl_vlm.plan.hardware import GIB, Card
from rl_vlm.plan.weights import num_experts

BF16_BYTES = 2

BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's KV cache on CUDA; a sequence takes whole blocks."""

LARGE_CARD = 70 * GIB
"""Least memory of cards for which vLLM's profiling pass is larger."""

CUDA_GRAPHS = GIB // 2
"""Bytes of vLLM's CUDA graphs, an assumption; sleep mode keeps them. vLLM measures them at start and prints "CUDA graph
memory profiling". With LoRA it captures each graph twice, with and without an adapter (`get_lora_capture_cases`)."""


@dataclass(frozen=True)
class ImageSize:
    """The size of an image for a model."""

    tokens: int
    """Tokens in the language model."""
    patches: int


NO_IMAGE = ImageSize(0, 0)


@dataclass(frozen=True)
class VLLMMemory:
    """Bytes of one GPU's share of vLLM."""

    weights: int
    """Weights, with the buffers of an adapter."""
    activations: int
    """Peak of vLLM's profiling pass, which runs `max_num_batched_tokens` tokens at once."""
    graphs: int
    """CUDA graphs."""
    bytes_per_sequence: int
    """KV cache of one prompt with its completion."""

    @property
    def beside_cache(self) -> int:
        """Return all bytes but the KV cache."""
        return self.weights + self.activations + self.graphs

    def utilization(self, card: Card, num_sequences: int) -> float:
        """Return the smallest `vllm_gpu_memory_utilization` that holds this many sequences, rounded up to two decimals.

        A value above 1 does not fit.
        """
        needed = self.beside_cache + num_sequences * self.bytes_per_sequence
        return math.ceil(100 * needed / card.memory) / 100

    def cache(self, card: Card, utilization: float) -> int:
        """Return the bytes that `vllm_gpu_memory_utilization` leaves for the KV cache."""
        return max(0, int(card.memory * utilization) - self.beside_cache)

    def num_sequences(self, card: Card, utilization: float) -> int:
        """Return the number of full-length sequences that the KV cache holds at once."""
        return self.cache(card, utilization) // self.bytes_per_sequence


def batched_tokens(card: Card) -> int:
    """Return vLLM's default of `max_num_batched_tokens` for `LLM`, which depends on the card."""
    return 16384 if card.memory >= LARGE_CARD and "a100" not in card.name.lower() else 8192


def vllm_memory(
    config: Any, num_parameters: int, num_vision_parameters: int, tokens_per_sequence: int,
    tensor_parallel_size: int = 1, max_num_batched_tokens: int = 8192, enforce_eager: bool = False,
    image: ImageSize = NO_IMAGE, lora_rank: int = 0,
) -> VLLMMemory:  # fmt: skip
    """Compute vLLM's memory for a transformers config in bfloat16.

    `tokens_per_sequence` counts prompt, images and completion. `image` is the largest image that vLLM's processor
    admits. `lora_rank` is vLLM's limit on the rank of adapters, or 0 without adapters. Raises ConfigError if
    `tensor_parallel_size` does not divide the attention heads.
    """
    text = config.get_text_config()
    check_tensor_parallel(text, tensor_parallel_size)
    language = num_parameters - num_vision_parameters
    divides_vision = vision_heads(config) % tensor_parallel_size == 0
    vision = math.ceil(num_vision_parameters / tensor_parallel_size) if divides_vision else num_vision_parameters
    lora = lora_bytes(text, lora_rank, tensor_parallel_size)
    graphs = 0 if enforce_eager else CUDA_GRAPHS * (2 if lora_rank else 1)
    blocks = math.ceil(tokens_per_sequence / BLOCK_TOKENS)
    return VLLMMemory(
        weights=BF16_BYTES * (math.ceil(language / tensor_parallel_size) + vision) + lora,
        activations=profiled_bytes(
            config, image, max_num_batched_tokens, tensor_parallel_size, tensor_parallel_size if divides_vision else 1
        ),
        graphs=graphs,
        bytes_per_sequence=blocks * BLOCK_TOKENS * kv_bytes_per_token(config, tensor_parallel_size),
    )


def check_tensor_parallel(text: Any, tensor_parallel_size: int) -> None:
    """Raise ConfigError if vLLM cannot divide the attention heads of a text config over this many GPUs."""
    heads, kv_heads, size = text.num_attention_heads, text.num_key_value_heads, tensor_parallel_size
    valid = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if size not in valid:
        raise ConfigError(
            f"`vllm_tensor_parallel_size` {size} does not divide the model's {heads} attention heads and {kv_heads} KV "
            f"heads; valid: {', '.join(map(str, valid))}"
        )


def kv_bytes_per_token(config: Any, tensor_parallel_size: int = 1) -> int:
    """Return the bytes of one token's keys and values in all layers on one GPU, in bfloat16.

    Layers with sliding-window attention are counted as full ones, which is exact up to the window.
    """
    text = config.get_text_config()
    kv_heads = max(1, text.num_key_value_heads // tensor_parallel_size)
    return 2 * text.num_hidden_layers * kv_heads * head_dim(text) * BF16_BYTES


def vision_heads(config: Any) -> int:
    """Return the attention heads of the vision tower."""
    vision = config.vision_config
    return getattr(vision, "num_heads", None) or vision.num_attention_heads


def profiled_bytes(
    config: Any, image: ImageSize, max_num_batched_tokens: int, language_gpus: int, vision_gpus: int
) -> int:
    """Return the activations of vLLM's profiling pass (`GPUModelRunner.profile_run`, model runner V2).

    The vision tower runs first, on as many images as fit into `max_num_batched_tokens`, but at least one
    (`MultiModalBudget`). Its outputs then stay in the encoder cache while the language model runs. A buffer for the
    embeddings of one step remains (`EncoderRunner`). Deepstack layers of the tower have outputs and buffers too.
    """
    text, vision = config.get_text_config(), config.vision_config
    language = profile_peak(text, max_num_batched_tokens, language_gpus)
    if not image.tokens:
        return language
    hidden = BF16_BYTES * text.hidden_size * (1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()))
    num_images = max(1, max_num_batched_tokens // image.tokens)
    tower = vision_peak(vision, num_images * image.patches, vision_gpus)
    return max(tower, num_images * image.tokens * hidden + language) + max_num_batched_tokens * hidden


def vision_peak(vision: Any, patches: int, tensor_parallel_size: int = 1) -> int:
    """Estimate the activations of the vision tower: the patches and the widest layer of one forward in bfloat16.

    The widest layer is the MLP. It holds two hidden states. With a gate, as in Qwen2.5-VL, it adds two projections and
    their product, otherwise one projection and its activation.
    """
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    intermediate = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    pixels = 3 * getattr(vision, "temporal_patch_size", 1) * patch**2
    num_projections = 3 if getattr(vision, "hidden_act", None) == "silu" else 2
    per_patch = num_projections * math.ceil(intermediate / tensor_parallel_size) + 2 * width + pixels
    return BF16_BYTES * patches * per_patch


def lora_bytes(text: Any, rank: int, tensor_parallel_size: int = 1) -> int:
    """Return the bytes of vLLM's buffers for one adapter of this rank, in bfloat16.

    vLLM allocates them at start for every linear layer of the language model and for all experts, also for layers that
    the adapter does not change (`LoRAModelManager._create_lora_modules`). Tensor parallelism divides only the matrix
    next to the divided weight. Qwen3's embeddings are left out; they take less than 1%.
    """
    hidden = text.hidden_size
    query = text.num_attention_heads * head_dim(text) // tensor_parallel_size
    key_value = max(1, text.num_key_value_heads // tensor_parallel_size) * head_dim(text)
    attention = (3 * hidden + query + 2 * key_value) + (query + hidden)
    _, experts = num_experts(text)
    if experts > 1:  # the gate and up projections of an expert share a matrix (`FusedMoE3DWithLoRA`)
        inner = text.moe_intermediate_size // tensor_parallel_size
        mlp = (hidden + experts) + experts * (2 * hidden + 3 * inner)
    else:
        inner = text.intermediate_size // tensor_parallel_size
        mlp = 3 * hidden + 3 * inner
    return BF16_BYTES * rank * text.num_hidden_layers * (attention + mlp)


def profile_peak(text: Any, max_num_batched_tokens: int, tensor_parallel_size: int = 1) -> int:
    """Estimate the activations of vLLM's profiling pass for one GPU: the widest layer of one forward in bfloat16.

    The widest layer is the MLP. It holds two projections, their product and two hidden states at once. The pass
    computes logits for `max_num_seqs` rows only, which take less.
    """
    experts_per_token = getattr(text, "num_experts_per_tok", None) or 0
    intermediate = experts_per_token * text.moe_intermediate_size if experts_per_token else text.intermediate_size
    per_token = 3 * math.ceil(intermediate / tensor_parallel_size) + 2 * text.hidden_size
    return BF16_BYTES * max_num_batched_tokens * per_token


def hf_cache_bytes(
    config: Any, prompt_tokens: int, completion_tokens: int, num_generations: int, max_num_seqs: int,
    shares_prompts: bool, is_autocast: bool,
) -> int:  # fmt: skip
    """Return the bytes in bfloat16 of the KV caches that engine `hf` holds at the end of its longest batch.

    The caches of prefilled prompts stay while completions are decoded. They are in float32 under autocast. With
    `shares_prompts`, decoding holds each prompt once, in bfloat16, and buffers with room for own tokens. Otherwise it
    holds a copy of the prompt for every completion. One layer's buffer or cache is copied at a time.
    """
    prompts = max(1, max_num_seqs // num_generations)
    completions = min(max_num_seqs, prompts * num_generations)
    per_token, layers = kv_bytes_per_token(config), config.get_text_config().num_hidden_layers
    prefilled = prompts * prompt_tokens
    if shares_prompts:
        decoded = completions * (completion_tokens + ROOM)
        held = (3 if is_autocast else 1) * prefilled
    else:
        decoded = completions * (prompt_tokens + completion_tokens)
        held = prefilled
    return (held + decoded) * per_token + decoded * per_token // layers


def hf_logits_bytes(config: Any, max_num_seqs: int) -> int:
    """Return the peak bytes of sampling the next tokens: 22 per completion and token of the vocabulary.

    They hold the logits in bfloat16, the log-probs in float32, and the probabilities and their sums in float64.
    """
    return max_num_seqs * config.get_text_config().vocab_size * (BF16_BYTES + 4 + 2 * 8)
