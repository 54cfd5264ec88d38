"""Evaluates one model, as `rl-vlm eval` does."""

from __future__ import annotations

from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.evaluation.options import NO_OPTIONS, EvaluationOptions
from rl_vlm.evaluation.run import evaluate_models


def evaluate_run(config: RunConfig, options: EvaluationOptions = NO_OPTIONS) -> dict[str, Any]:
    """Evaluate the config's model, write `output_dir/evaluation/`, and return the content of `summary.json`."""
    (summary,) = evaluate_models({"": config}, options).values()
    return summary
