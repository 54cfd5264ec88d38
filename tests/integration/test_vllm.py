"""vLLM's CPU build in this process: what it samples is what the policy would, after every update."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm")

from rl_vlm.generation.vllm_common import engine_arguments
from rl_vlm.generation.vllm_local import VLLMEngine
from rl_vlm.weight_sync import PolicyWeights
from tests.integration.builders import sharp_checkpoint
from tests.integration.vllm_parity import Side, generator_logprobs, sampling, token_ids

NUM_UPDATES = 20

VARIANTS = {
    "full": {},
    "frozen vision": {"freeze_vision_tower": True},
    "adapter": {"use_peft": True, "lora_r": 4},
    "merged": {"use_peft": True, "lora_r": 4, "lora_sync": "merge", "lora_target_modules": ["q_proj", "down_proj"]},
    "merged vision": {
        "use_peft": True, "lora_r": 4, "lora_sync": "merge", "lora_target_modules": ["qkv", "k_proj"],
        "lora_exclude_modules": ["nothing"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=["weights", "adapter"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[VLLMEngine]:
    """One that takes weights, then one that takes adapters."""
    side = Side.of(checkpoint)
    rank = 4 if request.param == "adapter" else None
    engine = VLLMEngine(engine_arguments(side.config, str(checkpoint), rank), side.tokens, side.builder)
    yield engine
    engine.close()


@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probs_follow_the_policy(checkpoint: Path, engine: VLLMEngine, variant: str) -> None:
    side = Side.of(checkpoint, **VARIANTS[variant])
    source = PolicyWeights(side.policy, side.config.rollout.lora_sync)
    if source.sends_adapter != (engine.llm.llm_engine.vllm_config.lora_config is not None):
        pytest.skip("the other engine's")
    engine.adapter = None
    engine.load_weights(PolicyWeights(Side.of(checkpoint).policy, "adapter"))  # as at the start, all of them
    engine.sync(source, 0)
    fixed = side.hf.generate(side.requests, sampling(seed=0))
    first = side.scores(fixed).detach()
    for version in range(1, NUM_UPDATES + 1):
        side.update(fixed)
        engine.sync(source, version)
        groups = engine.generate(side.requests, sampling(seed=version))
        assert {group.policy_version for group in groups} == {version}
        assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-3
    assert (side.scores(fixed).detach() - first).abs().max() > 0.1
    greedy = sampling(seed=0, num_generations=1, temperature=0.0)
    assert token_ids(engine.generate(side.requests, greedy)) == token_ids(side.hf.generate(side.requests, greedy))

    side.update(fixed)  # and without sending the weights, they part
    groups = engine.generate(side.requests, sampling(seed=99))
    assert (generator_logprobs(groups) - side.scores(groups)).abs().max() > 1e-2
