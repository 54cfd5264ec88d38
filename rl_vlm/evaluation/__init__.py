"""Rollout-only evaluation: sample from held-out prompts and score, without an optimizer.

    rows ─ chunks ─► generate ─► reward ─► unfinished/*.json ─► completions.parquet, summary.json, kept.parquet

The trainer evaluates through the same `Evaluator`, so `rl-vlm eval` on a checkpoint gives the run's own figures.
"""

from rl_vlm.eval_options import EvaluationOptions
from rl_vlm.evaluation.evaluator import Evaluation, Evaluator, check_rewarded
from rl_vlm.evaluation.run import compare_checkpoints, evaluate_run

__all__ = ["Evaluation", "EvaluationOptions", "Evaluator", "check_rewarded", "compare_checkpoints", "evaluate_run"]
