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
from rl_vlm.plan.hardware import GIB, Card

BF16_BYTES = 2

BLOCK_TOKENS = 16
"""Tokens in a block of vLLM's KV cache on CUDA; a sequence takes whole blocks."""

LARGE_CARD = 70 * GIB
"""Least memory of cards for which vLLM's profiling pass is larger."""

CUDA_GRAPHS = GIB // 2
"""Bytes of vLLM's CUDA graphs, an assumption; sleep mode keeps them. vLLM measures them at start and prints "CUDA graph
memory profiling"."""


@dataclass(frozen=True)
class VLLMMemory:
    """Bytes of one GPU's share of vLLM."""

    weights: int
    activations: int
    """Peak of vLLM's profiling pass, which runs `max_num_batched_tokens` tokens at once, with CUDA graphs."""
    bytes_per_sequence: int
    """KV cache of one prompt with its completion."""

    def utilization(self, card: Card, num_sequences: int) -> float:
        """Return the smallest `vllm_gpu_memory_utilization` that holds this many sequences, rounded up to two decimals.

        A value above 1 does not fit.
        """
        needed = self.weights + self.activations + num_sequences * self.bytes_per_sequence
        return math.ceil(100 * needed / card.memory) / 100

    def cache(self, card: Card, utilization: float) -> int:
        """Return the bytes that `vllm_gpu_memory_utilization` leaves for the KV cache."""
        return max(0, int(card.memory * utilization) - self.weights - self.activations)

    def num_sequences(self, card: Card, utilization: float) -> int:
        """Return the number of full-length sequences that the KV cache holds at once."""
        return self.cache(card, utilization) // self.bytes_per_sequence


def batched_tokens(card: Card) -> int:
    """Return vLLM's default of `max_num_batched_tokens` for `LLM`, which depends on the card."""
    return 16384 if card.memory >= LARGE_CARD and "a100" not in card.name.lower() else 8192


def vllm_memory(
    config: Any, num_parameters: int, num_vision_parameters: int, tokens_per_sequence: int,
    tensor_parallel_size: int = 1, max_num_batched_tokens: int = 8192, enforce_eager: bool = False,
) -> VLLMMemory:  # fmt: skip
    """Compute vLLM's memory for a transformers config in bfloat16.

    `tokens_per_sequence` counts prompt, images and completion. Raises ConfigError if `tensor_parallel_size` does not
    divide the attention heads.
    """
    text = config.get_text_config()
    check_tensor_parallel(text, tensor_parallel_size)
    language = num_parameters - num_vision_parameters
    divides_vision = vision_heads(config) % tensor_parallel_size == 0
    vision = math.ceil(num_vision_parameters / tensor_parallel_size) if divides_vision else num_vision_parameters
    activations = profile_peak(text, max_num_batched_tokens, tensor_parallel_size)
    blocks = math.ceil(tokens_per_sequence / BLOCK_TOKENS)
    return VLLMMemory(
        weights=BF16_BYTES * (math.ceil(language / tensor_parallel_size) + vision),
        activations=activations + (0 if enforce_eager else CUDA_GRAPHS),
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
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = max(1, text.num_key_value_heads // tensor_parallel_size)
    return 2 * text.num_hidden_layers * kv_heads * head_dim * BF16_BYTES


def vision_heads(config: Any) -> int:
    """Return the attention heads of the vision tower."""
    vision = config.vision_config
    return getattr(vision, "num_heads", None) or vision.num_attention_heads


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
    config: Any, prompt_tokens: int, completion_tokens: int, num_generations: int, max_num_seqs: int
) -> int:
    """Return the bytes of the KV caches that engine `hf` holds at the end of its longest batch.

    The caches of prefilled prompts stay while completions are decoded. Every completion also has a copy of its prompt's
    cache: a group shares no memory. Appending a token copies one layer's cache, which is counted too.
    """
    prompts = max(1, max_num_seqs // num_generations)
    completions = min(max_num_seqs, prompts * num_generations)
    per_token, layers = kv_bytes_per_token(config), config.get_text_config().num_hidden_layers
    decoded = completions * (prompt_tokens + completion_tokens) * per_token
    return prompts * prompt_tokens * per_token + decoded + decoded // layers


def hf_logits_bytes(config: Any, max_num_seqs: int) -> int:
    """Return the peak bytes of sampling the next tokens: 22 per completion and token of the vocabulary.

    They hold the logits in bfloat16, the log-probs in float32, and the probabilities and their sums in float64.
    """
    return max_num_seqs * config.get_text_config().vocab_size * (BF16_BYTES + 4 + 2 * 8)
