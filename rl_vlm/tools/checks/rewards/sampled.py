"""Sample completions of training rows from the initial model, and score them as in training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import Finding
from rl_vlm.evaluation.directory import EvaluationDirectory
from rl_vlm.evaluation.figures import summarise
from rl_vlm.evaluation.run import EvaluatedModel
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.environments.contract import load_toolbox
from rl_vlm.rollout.scoring import checked_rows, choose_forms

FEW_LEARN = 0.5
"""If more than this share of the groups has no spread, most of a rollout teaches nothing."""


@dataclass(frozen=True)
class Sampled:
    """Figures of a model's completions."""

    groups: int
    completions: int
    reward: float | None
    """Mean reward; None if no completion has a reward."""
    groups_without_spread: float
    """Share of the prompts whose completions all have the same reward."""
    cut_off: float
    """Share of the completions that end at `max_completion_length`."""

    def findings(self) -> Iterator[Finding]:
        """Yield a finding if too many groups have no spread."""
        if self.groups_without_spread > FEW_LEARN:
            message = (
                f"{self.groups_without_spread:.0%} of the initial model's groups have equal rewards and teach nothing: "
                "choose easier rows with `rl-vlm eval --keep 0.1..0.9`, or add a reward that tells the completions "
                "apart"
            )
            yield Finding("warning", "no spread", message, function="all")


def sample_completions(config: RunConfig, num_rows: int) -> Sampled:
    """Sample and score `num_generations` completions per prompt of up to `num_rows` training rows, as in training."""
    rollout = config.rollout.model_copy(
        update={
            "num_generations_eval": config.rollout.num_generations,
            "eval_temperature": config.rollout.temperature,
        }
    )
    config = config.model_copy(update={"rollout": rollout})
    ranks = Ranks()
    try:
        toolbox = load_toolbox(config.rollout)
        with tempfile.TemporaryDirectory() as folder, RewardSuite(config.rewards, toolbox.rewarding) as rewards:
            usable = checked_rows(config, "train", rewards, ranks)
            step = max(1, len(usable) // num_rows)
            usable = replace(usable, indices=usable.indices[::step][:num_rows])
            choose_forms(rewards, usable, ranks)
            directory = EvaluationDirectory(Path(folder) / "evaluation", Path(folder) / "images")
            rows = EvaluatedModel(config, ranks, usable, rewards, directory, toolbox).sample_and_score().rows
    finally:
        ranks.close()
    metrics, of_samples = summarise(rows, {}, config.rollout.num_generations), {}
    for row in rows:
        of_samples.setdefault(row["sample_id"], set()).add(row["reward"])
    return Sampled(
        groups=len(of_samples),
        completions=len(rows),
        reward=metrics.get("reward"),
        groups_without_spread=fmean(len(found) == 1 for found in of_samples.values()),
        cut_off=metrics["completions/clipped_ratio"],
    )
