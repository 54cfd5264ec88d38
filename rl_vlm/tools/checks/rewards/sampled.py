"""Sample completions of training rows from the initial model, and score them as in training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import Finding
from rl_vlm.evaluation.directory import EvaluationDirectory
from rl_vlm.evaluation.figures import summarise
from rl_vlm.evaluation.run import EvaluatedModel
from rl_vlm.rollout.environments.build import load_functions
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
    """Share of the groups whose advantages would all be 0 in training."""
    cut_off: float
    """Share of the completions that end at `max_completion_length`."""

    def findings(self) -> Iterator[Finding]:
        """Yield a finding if too many groups have no spread."""
        if self.groups_without_spread > FEW_LEARN:
            message = (
                f"{self.groups_without_spread:.0%} of the initial model's groups have no advantage other than 0, and "
                "teach nothing: choose easier rows with `rl-vlm eval --keep 0.1..0.9`, or add a reward that tells the "
                "completions apart"
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
        toolbox, rewards = load_functions(config)
        with tempfile.TemporaryDirectory() as folder, rewards:
            usable = checked_rows(config, "train", rewards, ranks)
            step = max(1, len(usable) // num_rows)
            usable = replace(usable, indices=usable.indices[::step][:num_rows])
            choose_forms(rewards, usable, ranks)
            directory = EvaluationDirectory(Path(folder) / "evaluation", Path(folder) / "images")
            evaluation = EvaluatedModel(config, ranks, usable, rewards, directory, toolbox).sample_and_score()
    finally:
        ranks.close()
    metrics = summarise(evaluation.rows, {}, config.rollout.num_generations)
    num_groups = int(metrics["num_samples"])
    return Sampled(
        groups=num_groups,
        completions=len(evaluation.rows),
        reward=metrics.get("reward"),
        groups_without_spread=evaluation.num_without_variance / num_groups,
        cut_off=metrics["completions/clipped_ratio"],
    )
