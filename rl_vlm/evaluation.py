"""Rollout-only evaluation: sample from held-out prompts and score, without an optimizer.

The trainer evaluates through the same `Evaluator`, so `rl-vlm eval` on a checkpoint gives the run's own figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rl_vlm.config.load import check_evaluable
from rl_vlm.config.schema import RunConfig
from rl_vlm.data import load_rows
from rl_vlm.engine import Engine
from rl_vlm.generation import RolloutEngine
from rl_vlm.generation.hf import HFEngine
from rl_vlm.generation.sampling import sampling_of
from rl_vlm.loading import initial_checkpoint, load_policy
from rl_vlm.prompts import PromptBuilder, load_processor
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_log import completion_rows, write_rows
from rl_vlm.types import RolloutRequest, ScoredGroup, TrainerState

BOOTSTRAP_RESAMPLES = 1000


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: metrics over all samples, and one row per completion."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


class Evaluator:
    """Evaluates a generator on all held-out rows, each on exactly one rank."""

    def __init__(
        self, config: RunConfig, engine: Engine, builder: PromptBuilder, generator: RolloutEngine, rewards: RewardSuite
    ) -> None:
        self.config = config
        self.engine = engine
        self.builder = builder
        self.generator = generator
        self.rewards = rewards
        self.rows = load_rows(config.data, "eval")
        rewards.check_columns(self.rows.sample(0).columns)
        rollout = config.rollout
        self.sampling = sampling_of(config, rollout.num_generations_eval, rollout.eval_temperature)

    def run(self, state: TrainerState, show_progress: bool = False) -> Evaluation:
        """Sample, score and summarise. Every rank returns the same result."""
        mine = range(self.engine.rank, len(self.rows), self.engine.world_size)
        prompts_at_once = max(1, self.config.rollout.max_num_seqs // self.sampling.num_generations)
        chunks = [mine[i : i + prompts_at_once] for i in range(0, len(mine), prompts_at_once)]
        bar = tqdm(chunks, disable=None if show_progress else True)
        local = self.engine.together(lambda: [row for chunk in bar for row in self.evaluate_rows(chunk, state)])
        rows = sorted(self.engine.gather(local), key=lambda row: (row["row"], row["completion_index"]))
        return Evaluation(summarise(rows, self.rewards.names, self.sampling.num_generations), rows)

    def evaluate_rows(self, indices: Sequence[int], state: TrainerState) -> list[dict[str, Any]]:
        """One row per completion of the dataset rows `indices`."""
        prompts = [self.builder.build(self.rows.sample(index)) for index in indices]
        requests = [RolloutRequest(f"evaluation/{prompt.sample.sample_id}", prompt) for prompt in prompts]
        groups = self.generator.generate(requests, self.sampling)
        table = self.rewards.score(groups, state)
        weights = torch.tensor(self.rewards.weights)
        scored = [
            ScoredGroup(
                group,
                scores_GF=table.scores_PGF[p],
                rewards_G=(table.scores_PGF[p] * weights).nansum(-1).masked_fill(~table.valid_PG[p], torch.nan),
                advantages_G=torch.zeros(len(group.completions)),
                valid_G=table.valid_PG[p],
                has_variance=False,
            )
            for p, group in enumerate(groups)
        ]
        rows = completion_rows(state.global_step, scored, table)
        owners = [index for index in indices for _ in range(self.sampling.num_generations)]
        return [{"row": index, **row} for index, row in zip(owners, rows, strict=True)]


def summarise(rows: Sequence[dict[str, Any]], names: Sequence[str], num_generations: int) -> dict[str, float]:
    """Mean, 95% interval and pass@k of each reward function, and the shape of the completions.

    Completions that a function does not apply to, or failed on, do not count in its figures.
    """
    metrics = {"num_samples": float(len({row["sample_id"] for row in rows})), "num_completions": float(len(rows))}
    for column, name in [("reward", "reward"), *((name, f"rewards/{name}/mean") for name in names)]:
        values = [row[column] for row in rows if row[column] is not None]
        if values:
            metrics[name] = float(np.mean(values))
    for name in names:
        by_sample: dict[str, list[float]] = {}
        for row in rows:
            if row[name] is not None:
                by_sample.setdefault(row["sample_id"], []).append(row[name])
        if by_sample:
            low, high = bootstrap_interval([float(np.mean(values)) for values in by_sample.values()])
            metrics |= {f"rewards/{name}/ci_low": low, f"rewards/{name}/ci_high": high}
            metrics |= {f"rewards/{name}/pass@{k}": value for k, value in pass_at(by_sample, num_generations).items()}
    metrics["completions/mean_length"] = float(np.mean([row["completion_length"] for row in rows]))
    metrics["completions/clipped_ratio"] = float(np.mean([row["finish_reason"] == "length" for row in rows]))
    return metrics


def pass_at(by_sample: dict[str, list[float]], num_generations: int) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, … up to the completions per sample; a score of 1 or more passes.

    Unbiased: 1 - C(n - c, k) / C(n, k) for c of n that pass (Chen et al., arXiv:2107.03374, equation 1).
    """
    ks = [2**i for i in range(num_generations.bit_length()) if 2**i <= num_generations]
    result = {}
    for k in ks:
        estimates = [
            1.0 - np.prod(1.0 - k / np.arange(len(v) - sum(s >= 1 for s in v) + 1, len(v) + 1))
            for v in by_sample.values()
            if len(v) >= k
        ]
        if estimates:
            result[k] = float(np.mean(estimates))
    return result


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean over samples."""
    generator = np.random.default_rng(0)
    means = [generator.choice(values, size=len(values)).mean() for _ in range(BOOTSTRAP_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def evaluate_run(config: RunConfig) -> dict[str, float]:
    """`rl-vlm eval`: evaluate `model_name_or_path`, write `output_dir/evaluation/`, and return the metrics."""
    check_evaluable(config)
    engine = Engine(config.train.output_dir, config.log)
    initial = initial_checkpoint(config, engine)
    processor = load_processor(initial, config.model, config.data)
    policy = load_policy(config, initial, None).to(engine.device)
    generator = HFEngine.for_policy(policy, processor.tokenizer, config.rollout.max_num_seqs)
    with RewardSuite(config.rewards) as rewards:
        evaluator = Evaluator(config, engine, PromptBuilder(processor, config.data), generator, rewards)
        evaluation = evaluator.run(TrainerState(0, 0, 0.0), engine.is_main and not config.log.disable_tqdm)
    if engine.is_main:
        write_evaluation(Path(config.train.output_dir) / "evaluation", evaluation)
    engine.close()
    return evaluation.metrics


def write_evaluation(directory: Path, evaluation: Evaluation) -> None:
    """`completions.parquet` with a row per completion, and `summary.json` with the metrics."""
    import json

    write_rows(directory / "completions.parquet", evaluation.rows)
    (directory / "summary.json").write_text(json.dumps(evaluation.metrics, indent=2) + "\n")
