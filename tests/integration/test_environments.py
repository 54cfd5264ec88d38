"""Runs with environments: what is sampled is what is trained, runs resume bitwise, and no failure is a reward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import RewardError
from rl_vlm.evaluation.run import evaluate_run
from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.environments.build import build_trajectories, choose_turns
from rl_vlm.rollout.environments.contract import load_toolbox
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.run.run import train
from rl_vlm.types import Forward, Group, MicroBatch, RolloutRequest, ScoredGroup, SubGroup
from tests.helpers import tiny_run
from tests.helpers.calling import FAULTY, NUM_LOOKS, SHADES, calling_checkpoint
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.tiers import in_tiers

SETTINGS: dict[str, Any] = {
    "environment": SHADES, "reward_funcs": [NUM_LOOKS], "num_generations": 6, "max_completion_length": 220,
    "max_turns": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_checkpoint(tmp_path_factory.mktemp("calling"))


def config_of(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    return tiny_run.make_config(checkpoint, output_dir, **SETTINGS | settings)


def generate(config: RunConfig, checkpoint: Path, num_rows: int) -> tuple[Any, list[Group]]:
    """The policy, and groups that its own engine has sampled with the run's environment."""
    policy = load_policy(config, str(checkpoint))
    builder = PromptBuilder(load_processor(str(checkpoint), config.model, config.data), config.data)
    toolbox = load_toolbox(config.rollout)
    turns = choose_turns(config, str(checkpoint), builder, toolbox)
    trajectories = build_trajectories(config, toolbox, turns, False, 100, Ranks())
    engine = HFEngine.for_policy(policy, builder.processor.tokenizer, max_num_seqs=5)
    rows = load_rows(config.data, "train")
    requests = [RolloutRequest(str(i), build_prompt(rows, i, turns.builder)) for i in range(num_rows)]
    sampling = sampling_params(config, config.rollout.num_generations, 1.0)
    return policy, trajectories.generate(engine, requests, sampling)


@pytest.mark.parametrize(
    "family", in_tiers(["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "qwen3_5"], {"qwen2_5_vl"})
)
def test_what_is_sampled_is_what_is_trained(family: str, tmp_path: Path) -> None:
    """Shared rows compute the log-probs with which turns after images were sampled, in batches of five."""
    checkpoint = calling_checkpoint(tmp_path / "model", family)
    policy, groups = generate(config_of(checkpoint, tmp_path / "run"), checkpoint, 3)
    completions = [completion for group in groups for completion in group.completions]
    assert len({len(completion.turns) for completion in completions}) > 2
    assert sum(observation.num_images for completion in completions for observation in completion.observations) >= 3
    none = torch.zeros(len(groups[0].completions))
    scored = [ScoredGroup(g, none[:, None], none, none, none == 0, has_variance=True) for g in groups]
    subgroups = [SubGroup(each, members) for each in scored for members in each.group.by_prompt()]
    with torch.no_grad():
        logprobs_NT = policy(Forward(MicroBatch(subgroups, shared=True))).logprobs_NT
    for row, completion in zip(logprobs_NT, completions, strict=True):
        number = len(completion.token_ids)
        assert (row[:number] - completion.generator_logprobs).abs().max() <= 2e-5


@pytest.mark.parametrize("step", in_tiers(list(range(1, 11)), {4}, {9}))
def test_a_killed_run_goes_on_within_a_window_of_trajectories(
    checkpoint: Path, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of four updates: the observations that are trained on after a kill are those of the checkpoint."""
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2, "max_steps": 11}
    straight, killed = (
        config_of(checkpoint, tmp_path / name, **settings | {"max_steps": max(5, step + 1)})
        for name in ("straight", "killed")
    )
    train(straight)
    train_until(step, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight", last=max(5, step + 1))
    rows = [row for rows in tiny_run.completions(tmp_path / "straight").values() for row in rows]
    assert {"stop"} < {row["finish_reason"] for row in rows}


def test_failures_are_masked_told_or_left_out_and_never_a_reward(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"environment": FAULTY, "tool_timeout": 0.3, "max_steps": 2, "num_generations": 8, "prompts_per_step": 4}
    config = config_of(checkpoint, tmp_path / "run", **settings)
    summary = train(config)
    rows = [row for rows in tiny_run.completions(tmp_path / "run").values() for row in rows]
    found = Counter(row["finish_reason"] for row in rows)
    assert found["fault"] > 2 and found["stop"] > 2
    assert sum(summary["reward_faults"].values()) == found["fault"]
    for row in rows:
        assert (row["reward"] is None) == (row["finish_reason"] == "fault") == (row["fault"] is not None)
        assert row["finish_reason"] != "fault" or row["advantage"] == 0.0
    with pytest.raises(RewardError, match="max_fault_fraction"):
        train(config_of(checkpoint, tmp_path / "strict", **settings, max_fault_fraction=0.01))


def test_an_evaluation_runs_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"num_generations_eval": 4, "eval_temperature": 1.0, "eval_dataset_name": tiny_run.HELD_OUT_ROWS}
    config = config_of(checkpoint, tmp_path / "run", **settings)
    summary = evaluate_run(config)
    assert summary["num_completions"] == 20 and 0 < summary["rewards/Shades/mean"] < 1
    assert 0 < summary["rewards/num_looks/mean"] < 1
