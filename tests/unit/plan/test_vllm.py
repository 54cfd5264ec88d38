import pytest
from transformers import AutoConfig

from rl_vlm.errors import ConfigError
from rl_vlm.plan.hardware import Card, parse_card
from rl_vlm.plan.packaged import packaged_config
from rl_vlm.plan.vllm import (
    ImageSize,
    batched_tokens,
    check_tensor_parallel,
    hf_cache_bytes,
    hf_logits_bytes,
    kv_bytes_per_token,
    lora_bytes,
    profile_peak,
    profiled_bytes,
    vision_peak,
    vllm_memory,
)

GIB = 1073741824
CARD = Card("test", 100 * GIB)


def config_of(name: str):
    folder = packaged_config(name)
    assert folder is not None
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", 1, 36_864),  # 2 x 36 layers x 2 heads x 128 x 2 bytes
        ("Qwen/Qwen2.5-VL-7B-Instruct", 1, 57_344),  # 2 x 28 x 4 x 128 x 2
        ("Qwen/Qwen2.5-VL-7B-Instruct", 2, 28_672),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 28, 14_336),  # one of the four heads on each of 28
        ("Qwen/Qwen2.5-VL-72B-Instruct", 8, 40_960),  # 2 x 80 x 1 x 128 x 2
        ("Qwen/Qwen3-VL-8B-Instruct", 1, 147_456),  # 2 x 36 x 8 x 128 x 2
        ("google/gemma-3-4b-it", 1, 139_264),  # 2 x 34 x 4 x 256 x 2: its head_dim is not 2560 / 8
    ],
)
def test_bytes_of_a_tokens_keys_and_values(name, gpus, expected):
    assert kv_bytes_per_token(config_of(name), gpus) == expected


def test_gpus_must_divide_the_heads():
    text = config_of("Qwen/Qwen2.5-VL-7B-Instruct").get_text_config()
    with pytest.raises(ConfigError, match=r"`vllm_tensor_parallel_size` 3 .* 28 attention heads and 4 KV heads; valid"):
        check_tensor_parallel(text, 3)
    with pytest.raises(ConfigError, match=r"valid: 1, 2, 4, 28$"):  # 7 and 14 GPUs cannot share 4 KV heads equally
        check_tensor_parallel(text, 7)
    check_tensor_parallel(text, 4)


def test_weights_are_divided_over_gpus():
    config = config_of("Qwen/Qwen2.5-VL-7B-Instruct")
    one = vllm_memory(config, 8_292_166_656, 676_550_144, tokens_per_sequence=1024)
    assert one.weights == 16_584_333_312
    two = vllm_memory(config, 8_292_166_656, 676_550_144, tokens_per_sequence=1024, tensor_parallel_size=2)
    assert two.weights == 8_292_166_656


def test_a_vision_tower_whose_heads_cannot_be_divided_is_repeated():
    config = config_of("Qwen/Qwen2.5-VL-7B-Instruct")  # 16 heads of vision
    repeated = vllm_memory(config, 8_292_166_656, 676_550_144, 1024, tensor_parallel_size=28)
    assert repeated.weights == 2 * (271_986_304 + 676_550_144)  # 7,615,616,512 / 28, and the whole tower


def test_what_a_utilization_holds():
    memory = vllm_memory(
        config_of("Qwen/Qwen2.5-VL-7B-Instruct"), 8_292_166_656, 676_550_144, tokens_per_sequence=1000,
        max_num_batched_tokens=8192, enforce_eager=True,
    )  # fmt: skip
    assert memory.bytes_per_sequence == 63 * 16 * 57_344  # 1,000 tokens take 63 blocks
    assert memory.activations == 2 * 8192 * (3 * 18_944 + 2 * 3_584)
    needed = 16_584_333_312 + memory.activations + 100 * memory.bytes_per_sequence
    assert memory.utilization(CARD, 100) == 0.22 and 0.21 * 100 * GIB < needed < 0.22 * 100 * GIB
    assert memory.num_sequences(CARD, 0.22) >= 100 > memory.num_sequences(CARD, 0.21)
    assert memory.num_sequences(CARD, 0.1) == 0  # the weights alone take more


@pytest.mark.parametrize(("rank", "eager", "graphs"), [(0, False, GIB // 2), (32, False, GIB), (32, True, 0)])
def test_cuda_graphs_are_captured_twice_with_an_adapter(rank, eager, graphs):
    config = config_of("Qwen/Qwen2.5-VL-3B-Instruct")
    memory = vllm_memory(config, 10**9, 0, 1024, enforce_eager=eager, lora_rank=rank)
    assert memory.graphs == graphs
    assert memory.beside_cache == memory.weights + memory.activations + graphs


@pytest.mark.parametrize(
    ("name", "rank", "gpus", "expected"),
    [
        # hidden 2048, 16 heads and 2 KV heads of 128, MLP 11008, 36 layers: the matrices beside the hidden states, then
        # those beside the projections
        (
            "Qwen/Qwen2.5-VL-3B-Instruct", 32, 1,
            2 * 32 * 36 * (3 * 2048 + 2048 + 2 * 2048 + 2048 + 2048 + 2 * 256 + 2048 + 2 * 11008 + 11008),
        ),
        # hidden 3584, 28 heads and 4 KV heads of 128, MLP 18944, 28 layers; the second line is halved
        (
            "Qwen/Qwen2.5-VL-7B-Instruct", 16, 2,
            2 * 16 * 28 * (3 * 3584 + 3584 + 2 * 3584 + 3584 + (3584 + 2 * 512 + 3584 + 2 * 18944 + 18944) // 2),
        ),
        # hidden 2048, 32 heads and 4 KV heads of 128, router and 128 experts of 768, 48 layers
        (
            "Qwen/Qwen3-VL-30B-A3B-Instruct", 16, 1,
            2 * 16 * 48 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048 + 2048 + 128 + 128 * (2048 + 2 * 768 + 768 + 2048)),
        ),
    ],
)  # fmt: skip
def test_buffers_of_an_adapter(name, rank, gpus, expected):
    config = config_of(name)
    assert lora_bytes(config.get_text_config(), rank, gpus) == expected
    merged, adapter = (
        vllm_memory(config, 10**9, 0, 1024, tensor_parallel_size=gpus, lora_rank=lora) for lora in (0, rank)
    )
    assert adapter.weights - merged.weights == expected


def test_the_tower_with_and_without_a_gate():
    # patches of 3 x 2 x 14 x 14 and 3 x 2 x 16 x 16 values
    gated = config_of("Qwen/Qwen2.5-VL-7B-Instruct").vision_config
    assert vision_peak(gated, 1000) == 2 * 1000 * (3 * 3420 + 2 * 1280 + 1176)
    assert vision_peak(gated, 1000, tensor_parallel_size=4) == 2 * 1000 * (3 * 855 + 2 * 1280 + 1176)
    assert vision_peak(config_of("Qwen/Qwen3-VL-4B-Instruct").vision_config, 1000) == 2 * 1000 * (
        2 * 4096 + 2 * 1024 + 1536
    )


@pytest.mark.parametrize(
    ("name", "image", "expected"),
    [
        # 8 images of 1,000 tokens in 8,192. 3B: the tower takes 32,000 x 27,992 bytes, the language model less
        ("Qwen/Qwen2.5-VL-3B-Instruct", ImageSize(1000, 4000), 895_744_000 + 8192 * 4096),
        # 7B: the outputs of the tower, 8,000 x 7,168, and the language model
        ("Qwen/Qwen2.5-VL-7B-Instruct", ImageSize(1000, 4000), 57_344_000 + 1_048_576_000 + 8192 * 7168),
        # one image that is larger than the batch
        ("Qwen/Qwen2.5-VL-7B-Instruct", ImageSize(20_000, 80_000), 80_000 * 27_992 + 8192 * 7168),
        # three deepstack layers: buffers of 4 x 2 x 2560 bytes per token
        ("Qwen/Qwen3-VL-4B-Instruct", ImageSize(1000, 4000), 32_000 * 23_552 + 8192 * 20_480),
        ("Qwen/Qwen2.5-VL-7B-Instruct", ImageSize(0, 0), 1_048_576_000),
    ],
)
def test_the_profiling_pass_runs_the_tower_first(name, image, expected):
    assert profiled_bytes(config_of(name), image, 8192, 1, 1) == expected


@pytest.mark.parametrize(
    ("card", "tokens"),
    [("24GB", 8192), ("l40s", 8192), ("a100-80gb", 8192), ("h100", 16384), ("b200", 16384), ("69GiB", 8192)],
)
def test_tokens_of_the_profiling_pass(card, tokens):
    assert batched_tokens(parse_card(card)) == tokens


def test_an_a100_by_its_full_name():
    assert batched_tokens(Card("NVIDIA A100-SXM4-80GB", 79 * GIB)) == 8192


def test_a_mixture_of_experts_computes_the_chosen_ones():
    text = config_of("Qwen/Qwen3-VL-30B-A3B-Instruct").get_text_config()
    assert profile_peak(text, 1000) == 2 * 1000 * (3 * 8 * 768 + 2 * 2048)


def hf_cache(max_num_seqs: int, shares_prompts: bool, is_autocast: bool = True) -> int:
    """For prompts of 500 tokens and groups of 8 completions of 200."""
    config = config_of("Qwen/Qwen2.5-VL-7B-Instruct")
    return hf_cache_bytes(config, 500, 200, 8, max_num_seqs, shares_prompts=shares_prompts, is_autocast=is_autocast)


def test_the_cache_of_engine_hf_holds_each_prompt_once():
    # 2 x 500 tokens of prompts; 16 x 200 tokens of completions with room for 128 more, and one layer of 28 once more
    assert hf_cache(16, shares_prompts=True, is_autocast=False) == 57_344 * 1000 + 57_344 * 16 * 328 * 29 // 28
    # under autocast the prefilled prompts are in float32, and are copied to bfloat16
    assert hf_cache(16, shares_prompts=True) == 57_344 * 3000 + 57_344 * 16 * 328 * 29 // 28


def test_without_sharing_it_copies_the_prompt_to_every_completion():
    # 16 completions of two prompts: 2 x 500 tokens of prompts, 16 x 700 of completions, one layer of 28 once more
    assert hf_cache(16, shares_prompts=False) == 57_344 * (1000 + 11_200 + 400)


def test_a_group_above_max_num_seqs_is_decoded_in_slices():
    assert hf_cache(4, shares_prompts=False) == 57_344 * (500 + 2800 + 100)


def test_logits_of_a_decoding_step():
    assert hf_logits_bytes(config_of("Qwen/Qwen2.5-VL-7B-Instruct"), 2) == 2 * 152_064 * 22  # bf16, fp32 and twice fp64
