"""Runs with environments: what is sampled is what is trained, runs resume bitwise, and no failure is a reward."""

from __future__ import annotations

import json
import logging
from collections import Counter
from math import comb
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, RewardError
from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.environments.build import build_trajectories, choose_turns
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.run.run import train
from rl_vlm.types import Forward, Group, MicroBatch, RolloutRequest, ScoredGroup, SubGroup
from tests.helpers import tiny_run
from tests.helpers.calling import FAULTY, NUM_LOOKS, SHADES, STEPS, calling_checkpoint
from tests.helpers.evaluating import evaluate_run
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.stock import stock_logprobs
from tests.helpers.tiers import in_tiers

SETTINGS: dict[str, Any] = {
    "environment": SHADES, "reward_funcs": [NUM_LOOKS], "num_generations": 6, "max_completion_length": 220,
    "max_turns": 4,
}  # fmt: skip


OF_STEPS: dict[str, Any] = {
    "environment": STEPS, "environment_protocol": "steps", "environment_kwargs": {"num_steps": 4},
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
    trajectories = build_trajectories(config, toolbox, turns, False, Ranks())
    engine = HFEngine.for_policy(policy, builder.processor.tokenizer, max_num_seqs=5)
    rows = load_rows(config.data, "train")
    requests = [RolloutRequest(str(i), build_prompt(rows, i, turns.builder)) for i in range(num_rows)]
    sampling = sampling_params(config, config.rollout.num_generations, 1.0)
    return policy, trajectories.generate(engine, requests, sampling)


@pytest.mark.parametrize(
    "family", in_tiers(["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "qwen3_5"], (), {"qwen2_5_vl", "qwen3_5"})
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


@pytest.mark.parametrize(
    "family", in_tiers(["qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "qwen3_5"], (), {"qwen2_5_vl", "qwen3_5"})
)
@pytest.mark.parametrize("shared", [True, False])
def test_edited_contexts_are_trained_as_they_were_sampled(family: str, shared: bool, tmp_path: Path) -> None:
    """Also as the library's own model computes each context alone."""
    checkpoint = calling_checkpoint(tmp_path / "model", family)
    edits = {"keep_images": 1, "edit_every": 1, "max_completion_length": 400, "max_turns": 8}
    policy, groups = generate(config_of(checkpoint, tmp_path / "run", **OF_STEPS | edits), checkpoint, 2)
    completions = [completion for group in groups for completion in group.completions]
    assert max(len(completion.contexts) for completion in completions) >= 3
    none = torch.zeros(len(groups[0].completions))
    scored = [ScoredGroup(g, none[:, None], none, none, none == 0, has_variance=True) for g in groups]
    batch = MicroBatch([SubGroup(each, some) for each in scored for some in each.group.by_prompt()], shared)
    with torch.no_grad():
        logprobs_NT = policy(Forward(batch)).logprobs_NT
    by_completion = {id(c): g.prompt_of(i) for g in groups for i, c in enumerate(g.completions)}
    for row, completion in zip(logprobs_NT, batch.completions, strict=True):
        number = len(completion.token_ids)
        assert (row[:number] - completion.generator_logprobs).abs().max() <= 2e-5
        stock = stock_logprobs(
            policy.transformer, policy.family, by_completion[id(completion)], completion,
            banned=policy.banned_token_ids,
        ).detach()  # fmt: skip
        assert (row[:number] - stock).abs().max() <= 2e-5


def test_runs_with_edited_contexts_are_equal_however_completions_are_cut(checkpoint: Path, tmp_path: Path) -> None:
    """Also GSPO's second update, which needs the log-probs of all contexts."""
    settings = OF_STEPS | {
        "keep_images": 1, "edit_every": 1, "max_completion_length": 400, "max_turns": 5, "num_iterations": 2,
        "steps_per_generation": 1, "importance_sampling_level": "sequence", "max_steps": 4, "epsilon": 5.0,
    }  # fmt: skip
    metrics, forwards = [], []
    for budget in (100_000, 300):
        output_dir = tmp_path / str(budget)
        train(config_of(checkpoint, output_dir, **settings, micro_batch_tokens=budget))
        rows = tiny_run.metric_lines(output_dir)
        metrics.append([(row["loss"], row["grad_norm"], row["entropy"]) for row in rows])
        forwards.append([row["compute/shared_forwards"] for row in rows])
    assert metrics[1] == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in metrics[0]]
    assert forwards[0] == [1, 1, 1, 1]
    first, second = forwards[1][2:]  # the updates of the second window, which has long episodes
    assert second > 1.5 * first > 10


def test_steps_are_trained_as_they_were_sampled(checkpoint: Path, tmp_path: Path) -> None:
    """The log-probs of a shared row are those of sampling, and the reward is the sum of the rewards of steps."""
    settings = OF_STEPS | {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 3}
    policy, groups = generate(config_of(checkpoint, tmp_path / "run", **OF_STEPS), checkpoint, 2)
    none = torch.zeros(6)
    scored = [ScoredGroup(g, none[:, None], none, none, none == 0, has_variance=True) for g in groups]
    batch = MicroBatch([SubGroup(each, some) for each in scored for some in each.group.by_prompt()], shared=True)
    with torch.no_grad():
        logprobs_NT = policy(Forward(batch)).logprobs_NT
    for row, completion in zip(logprobs_NT, batch.completions, strict=True):
        assert (row[: len(completion.token_ids)] - completion.generator_logprobs).abs().max() <= 2e-5
    train(config_of(checkpoint, tmp_path / "run", **settings))
    rows = [row for rows in tiny_run.completions(tmp_path / "run").values() for row in rows]
    for row in rows:
        steps = json.loads(row["turns"])
        cut = row["finish_reason"] == "length"  # the last turn or its observation does not fit
        assert row["reward"] == pytest.approx(sum(step.get("reward", 0) for step in steps))
        assert [len(step["results"]) for step in steps] == [1] * (row["num_turns"] - cut) + [0] * cut
    assert {row["num_turns"] for row in rows} == {1, 2, 3, 4}


@pytest.mark.slow
def test_an_environment_makes_its_own_tasks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have no content: `reset` gives the task from its seed. A killed run goes on with the same tasks."""
    settings = OF_STEPS | {"dataset_name": "draws:100", "eval_dataset_name": "draws:5", "eval_steps": 2, "max_steps": 3}
    straight, killed = (config_of(checkpoint, tmp_path / name, **settings) for name in ("straight", "killed"))
    train(straight)
    train_until(2, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "straight", last=3)
    rows = [row for rows in tiny_run.completions(tmp_path / "straight").values() for row in rows]
    prompts = {row["sample_id"]: row["prompt"] for row in rows}
    assert len(prompts) == 6 and len(set(prompts.values())) == 6  # another grey for each draw
    assert all("Look at greys." in prompt and "Grey" in prompt for prompt in prompts.values())
    held_out = tiny_run.completions(tmp_path / "straight", "held_out")
    assert held_out and all(len(rows) == 5 for rows in held_out.values())


@pytest.mark.parametrize("credit", ["return", "gigpo"])
def test_turns_have_the_advantages_of_their_steps(checkpoint: Path, credit: str, tmp_path: Path) -> None:
    """All steps count alike with `return`; `gigpo` adds them among equal greys to the completion's own advantage."""
    settings = OF_STEPS | {"reward_funcs": [], "turn_advantages": credit, "scale_rewards": "none", "max_steps": 2}
    train(config_of(checkpoint, tmp_path / "run", **settings))
    rows = [row for rows in tiny_run.completions(tmp_path / "run").values() for row in rows]
    groups: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["sample_id"]), []).append(row)
    differ = 0
    for group in groups.values():
        turns = [json.loads(row["turns"]) for row in group]
        returns = [[sum(turn.get("reward", 0) for turn in some[i:]) for i in range(len(some))] for some in turns]
        flat = [value for values in returns for value in values]
        totals = [values[0] for values in returns]
        for some, values in zip(turns, returns, strict=True):
            for i, (turn, value) in enumerate(zip(some, values, strict=True)):
                expected = value - sum(flat) / len(flat)
                if credit == "gigpo" and i == 0:  # all start alike
                    expected = 2 * (values[0] - sum(totals) / len(totals))
                if credit == "return" or i == 0:
                    assert turn["advantage"] == pytest.approx(expected, abs=1e-5)
                differ += turn["advantage"] != some[0]["advantage"]
    assert differ > 5


PROTOCOLS: dict[str, dict[str, Any]] = {"tools": {}, "steps": OF_STEPS}
KILLS = [(protocol, step) for protocol in PROTOCOLS for step in range(1, 11)]


@pytest.mark.parametrize("kill", in_tiers(KILLS, (), {("steps", 7)}))
def test_a_killed_run_goes_on_within_a_window_of_trajectories(
    checkpoint: Path, kill: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of four updates: the observations that are trained on after a kill are those of the checkpoint."""
    protocol, step = kill
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_iterations": 2}
    straight, killed = (
        config_of(checkpoint, tmp_path / name, **settings, **PROTOCOLS[protocol], max_steps=max(5, step + 1))
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


def test_what_no_engine_sampled_is_not_compared_with_rollouts(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A completion whose reset failed has a token in place of a turn."""
    settings = {"environment": "tests.helpers.calling:OftenDown", "max_steps": 1, "num_generations": 8}
    with caplog.at_level(logging.INFO):
        train(config_of(checkpoint, tmp_path / "run", **settings))
    assert "rollouts and dense rows differ in log-probs by" in caplog.text
    rows = [row for rows in tiny_run.completions(tmp_path / "run").values() for row in rows]
    assert {"fault"} < {row["finish_reason"] for row in rows}


def reads_environments(environments: list[Any], **columns: Any) -> list[float]:
    return [0.0 for _ in environments]


def test_a_run_refuses_rows_and_too_few_environments_at_once(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"environment": {"a": SHADES, "b": SHADES}, "max_environments": 1}
    settings |= {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "reward_funcs": [f"{__name__}:reads_environments"]}
    config = config_of(checkpoint, tmp_path / "run", **settings)
    for refuse in (train, evaluate_run):
        with pytest.raises(ConfigError, match=r"max_environments 1 is too small(.|\n)*no column `environment`"):
            refuse(config)


def test_an_evaluation_runs_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"num_generations_eval": 4, "eval_temperature": 1.0, "eval_dataset_name": tiny_run.HELD_OUT_ROWS}
    settings["reward_funcs"] = [{"function": NUM_LOOKS, "solved_from": 0.2}]
    config = config_of(checkpoint, tmp_path / "run", **settings)
    summary = evaluate_run(config)
    assert summary["num_completions"] == 20 and 0 < summary["rewards/Shades/mean"] < 1
    assert 0 < summary["rewards/num_looks/mean"] < 1
    (file,) = (tmp_path / "run" / "evaluation").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert [len(row["images"]) for row in rows] == [2] * 20  # that of the row, and that of `reset`
    turns = [turn for row in rows for turn in json.loads(row["turns"])]
    kept = [path for turn in turns for result in turn["results"] for path in result.get("kept", [])]
    assert kept and all((file.parent / path).is_file() for path in kept)
    num_solved = Counter({row["sample_id"]: 0 for row in rows})
    num_solved.update(row["sample_id"] for row in rows if row["num_looks"] >= 0.2)
    assert len(num_solved) == 5 and 0 < num_solved.total() < 20
    for k in (1, 2, 4):  # of all ways to choose k of the four completions, those that have a solved one
        expected = mean(1 - comb(4 - number, k) / comb(4, k) for number in num_solved.values())
        assert summary[f"rewards/num_looks/pass@{k}"] == pytest.approx(expected)
