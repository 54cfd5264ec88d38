"""vLLM's CPU build in this process: what it samples is what the policy would, after every update."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rl_vlm.data.images import png_bytes
from rl_vlm.data.sampler import Draw
from rl_vlm.data.turns import TurnFormat
from rl_vlm.errors import ConfigError, DataError, ModelError, RolloutError
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.rollout.partial import InFlight, roll_on
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.rollout.vllm.build import parts_of_checkpoint
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run.run import train
from rl_vlm.types import Observation, Progress, RolloutRequest, Sampling, ToolResult
from tests.helpers import tiny_run
from tests.helpers.builders import make_prompt, noise_image, sharp_checkpoint
from tests.helpers.tiers import in_tiers
from tests.helpers.videos import noise_video, video_prompt
from tests.helpers.vllm_parity import Side, generator_logprobs, sampling, started_engine, token_ids, video_requests

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")

NUM_UPDATES = 6

VARIANTS = {
    "full": {},
    "frozen vision": {"freeze_vision_tower": True},
    "adapter": {"use_peft": True, "lora_r": 4},
    "merged": {"use_peft": True, "lora_r": 4, "lora_sync": "merge", "lora_target_modules": ["q_proj", "down_proj"]},
    "merged vision": {
        "use_peft": True, "lora_r": 4, "lora_sync": "merge", "lora_target_modules": ["qkv", "k_proj"],
        "lora_exclude_modules": [],
    },
    "merged parts": {
        "use_peft": True, "lora_r": 4, "lora_sync": "merge",
        "lora_target_modules": ["lm_head", "projector", "vision_tower"],
    },
    "adapter of a part": {"use_peft": True, "lora_r": 4, "lora_target_modules": "language_model"},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=["weights", "adapter"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[VLLMEngine]:
    """One that takes weights, then one that takes adapters."""
    with started_engine(
        Side.of(checkpoint, most_videos=2), lora_rank=4 if request.param == "adapter" else None
    ) as engine:
        yield engine


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


def test_paused_completions_go_on_behind_what_there_is_of_them(checkpoint: Path, engine: VLLMEngine) -> None:
    side = Side.of(checkpoint)
    engine.adapter = None
    engine.sync(PolicyWeights(side.policy, "adapter"), 0)
    for temperature in (0.0, 1.0):
        at_once = replace(sampling(seed=0, temperature=temperature), num_generations=1 if temperature == 0 else 3)
        new = [InFlight(Draw(0, i), request) for i, request in enumerate(side.requests)]
        groups, _ = roll_on(
            new, len(new), lambda requests, s=at_once: engine.generate(requests, replace(s, max_rollout_tokens=3))
        )
        found = list(groups.values())
        assert max(len(c.token_ids) for group in found for c in group.completions) == at_once.max_completion_length
        assert (generator_logprobs(found) - side.scores(found)).abs().max() <= 1e-3
        if temperature == 0:
            assert token_ids(found) == token_ids(engine.generate(side.requests, at_once))


def test_turns_go_on_after_observations_with_images(checkpoint: Path, engine: VLLMEngine) -> None:
    """Each third completion sees two images, one, and none. Where vLLM reads other tokens, it is a fault alone."""
    side = Side.of(checkpoint)
    engine.adapter = None
    engine.sync(PolicyWeights(side.policy, "adapter"), 0)
    turns = TurnFormat.choose(side.builder, side.tokens.stop, [], "auto", "auto", True)
    seen = [observed(turns, images) for images in ([1, 2], [3], [])]
    limits = Sampling(3, max_completion_length=150, temperature=1.0, seed=0, max_rollout_tokens=4)
    groups = engine.generate(side.requests, limits)
    for _ in range(2):
        waiting = [
            replace(
                g, completions=[replace(g.completions[i], finish_reason="paused", pending=seen[i]) for i in range(3)]
            )
            for g in groups
        ]
        groups = engine.generate([RolloutRequest(g.group_id, g.prompt, g) for g in waiting], limits)
    assert [len(c.observations) for g in groups for c in g.completions] == [2] * 9
    assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-3

    other = replace(seen[1], unexpanded_ids=(*seen[1].unexpanded_ids, 20))
    waiting = [
        replace(c, finish_reason="paused", pending=o)
        for c, o in zip(groups[0].completions, [seen[0], other, seen[2]], strict=True)
    ]
    request = RolloutRequest("g0", groups[0].prompt, replace(groups[0], completions=waiting))
    (group,) = engine.generate([request], replace(limits, max_completion_length=200))
    assert [(c.finish_reason == "fault", c.fault and c.fault.kind) for c in group.completions] == [
        (False, None), (True, "ids"), (False, None),
    ]  # fmt: skip


def test_videos_are_read_as_by_the_policy(checkpoint: Path, engine: VLLMEngine) -> None:
    """In new groups, and in a second turn after an observation with an image."""
    side = Side.of(checkpoint)
    engine.adapter = None
    engine.sync(PolicyWeights(side.policy, "adapter"), 0)
    turns = TurnFormat.choose(side.builder, side.tokens.stop, [], "auto", "auto", True)
    limits, seen = replace(sampling(seed=0), max_completion_length=100, max_rollout_tokens=4), observed(turns, [3])
    groups = engine.generate(video_requests(checkpoint, most_videos=2), limits)
    assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-5
    waiting = [
        replace(g, completions=[replace(c, finish_reason="paused", pending=seen) for c in g.completions])
        for g in groups
    ]
    groups = engine.generate([RolloutRequest(g.group_id, g.prompt, g) for g in waiting], limits)
    assert {len(c.observations) for g in groups for c in g.completions} == {1}
    assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-5
    many = RolloutRequest("many", video_prompt(checkpoint, [noise_video(4, seed=i) for i in range(3)]))
    with pytest.raises(DataError, match=r"^vLLM refuses a prompt: At most 2 video\(s\)"):
        engine.generate([many], limits)


def observed(turns: TurnFormat, seeds: list[int]) -> Observation:
    """What a user shows: some images and a text."""
    pictures = [noise_image(32, 24, seed) for seed in seeds]
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "Look."}]
    result = ToolResult(content, tuple(map(png_bytes, pictures)))
    return turns.observe("turn 1", [], [], [result], [pictures])


def test_preemptions_are_counted(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Seven blocks of 32 tokens for six sequences, of which four need three blocks each in the end."""
    side = Side.of(checkpoint)
    arguments = engine_arguments(side.config, str(checkpoint), None)
    small = {"block_size": 32, "num_gpu_blocks_override": 7, "max_model_len": 160, "enable_prefix_caching": False}
    engine = VLLMEngine(arguments | small, side.tokens, side.builder)
    short, long = sampling(seed=0, num_generations=1), sampling(seed=0, num_generations=6)
    engine.generate(side.requests[:1], replace(short, max_completion_length=2))
    assert engine.counters == {}
    groups = engine.generate(side.requests[2:], replace(long, max_completion_length=70))
    assert engine.counters["sampling/preemptions"] > 0
    assert "vLLM's KV cache is full" in caplog.text
    assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-3
    engine.close()


def test_a_run_samples_from_its_own_weights_also_after_a_kill(tmp_path: Path) -> None:
    checkpoint, output = sharp_checkpoint("qwen2_5_vl", tmp_path / "checkpoint"), tmp_path / "run"
    config = tiny_run.make_config(
        checkpoint, output, engine="vllm", vllm_max_model_length=256, max_num_seqs=16, max_steps=3, num_iterations=2
    )
    train(config)
    whole, texts = MetricsLog(output / "metrics.jsonl").read(), sampled_texts(output)
    assert [line["sampling/policy_version_lag"] for line in whole] == [0, 1, 0]
    assert ["weight_sync/bytes" in line for line in whole] == [True, False, True]
    assert all(line["sampling/sampling_logp_difference/max"] <= 1e-3 for line in (whole[0], whole[2]))

    for step in (2, 3):
        shutil.rmtree(output / f"checkpoint-{step}")
    resumed = config.model_copy(update={"train": config.train.model_copy(update={"resume_from_checkpoint": "auto"})})
    train(resumed)
    assert sampled_texts(output) == texts
    again = MetricsLog(output / "metrics.jsonl").read()
    for name in ("loss", "grad_norm", "entropy", "reward"):  # vLLM's log-probs repeat up to rounding
        assert [line[name] for line in again] == pytest.approx([line[name] for line in whole], rel=1e-4, abs=1e-5)


def sampled_texts(output: Path) -> dict[str, list[str]]:
    return {name: [row["completion"] for row in rows] for name, rows in tiny_run.completions(output).items()}


def test_weights_that_differ_end_a_run_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    config = tiny_run.make_config(checkpoint, tmp_path / "run", engine="vllm", vllm_max_model_length=256)
    trained_weights = PolicyWeights.trained_weights

    def other_weights(self: PolicyWeights) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, 1.2 * weight) for name, weight in trained_weights(self))

    monkeypatch.setattr(PolicyWeights, "trained_weights", other_weights)
    with pytest.raises(RolloutError, match=r"differ between generator and trainer by .*vllm_max_logp_difference"):
        train(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not MetricsLog(tmp_path / "run/metrics.jsonl").read()


@pytest.mark.parametrize(
    "variant",
    in_tiers(["full", "adapter", "merged", "merged parts"], fast=(), ci={"merged parts"}),
)
def test_trained_weights_are_checked_after_they_are_sent(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    given = {"engine": "vllm", "vllm_max_model_length": 256, "max_steps": 3, "agreement_steps": 1}
    config = tiny_run.make_config(checkpoint, tmp_path / "run", **given, **VARIANTS[variant])
    means: list[tuple[int, float]] = []
    check_gaps = AgreementCheck.check_gaps

    def noted(check: AgreementCheck, gaps: torch.Tensor, progress: Progress) -> None:
        means.append((progress.policy_version, gaps.mean().item()))
        check_gaps(check, gaps, progress)

    monkeypatch.setattr(AgreementCheck, "check_gaps", noted)
    train(config)
    assert [version for version, _ in means] == [0, 1, 2]
    assert all(mean <= 1e-3 for _, mean in means)


def test_a_model_that_vllm_does_not_run_is_named_with_the_way_out(tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace("Qwen2_5_VLForConditionalGeneration", "NobodyKnowsThisModel"))
    side = Side.of(checkpoint)
    with pytest.raises(ModelError, match=r"(?s)NobodyKnowsThisModel.*engine hf runs every supported family"):
        VLLMEngine(engine_arguments(side.config, str(checkpoint), None), side.tokens, side.builder)


def test_a_prompt_and_an_image_that_are_too_long_are_named(checkpoint: Path, engine: VLLMEngine) -> None:
    prompt = make_prompt(checkpoint, [noise_image(32, 24, seed=0)], text="no " * 250)
    with pytest.raises(DataError, match=r"Sample s: \d+ .*vllm\.vllm_max_model_length"):
        engine.generate([RolloutRequest("g", prompt)], sampling(seed=0))


def test_what_vllm_cannot_load_as_an_adapter_is_refused(checkpoint: Path) -> None:
    settings = {"use_peft": True, "lora_target_modules": ["qkv"], "lora_exclude_modules": []}
    with pytest.raises(ConfigError, match=r"on the vision tower .*Set rollout.lora_sync: merge"):
        PolicyWeights(Side.of(checkpoint, **settings).policy, "adapter").adapter_rank()


def test_adapters_of_parts_that_vllm_cannot_apply_are_refused(
    checkpoint: Path, engine: VLLMEngine, tmp_path: Path
) -> None:
    """On a head that vLLM's model does not list, on a tied head merged, and on the tower of a checkpoint."""
    lora = {"use_peft": True, "lora_r": 4}
    head = PolicyWeights(Side.of(checkpoint, **lora, lora_target_modules="lm_head").policy, "adapter")
    if engine.llm.llm_engine.vllm_config.lora_config is not None:
        with pytest.raises(ConfigError, match=r"cannot load this adapter: .*lm_head.* Set rollout.lora_sync: merge"):
            engine.sync(head, 1)
        return
    tied = Side.of(sharp_checkpoint("internvl", tmp_path / "tied"), **lora, lora_target_modules="lm_head").policy
    with pytest.raises(ConfigError, match=r"lora_sync: merge: the adapter is on the LM head .* this model ties"):
        PolicyWeights(tied, "merge").adapter_rank()
    side = Side.of(checkpoint, **lora, lora_target_modules="projector")
    side.policy.model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"on the vision tower \(model.visual.merger.*rl-vlm export --merge"):
        parts_of_checkpoint(side.config, str(tmp_path / "adapter"), side.builder)
