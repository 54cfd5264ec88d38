"""What a run comes to, in a sentence for the person who started it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_vlm.metrics import function_name, is_score


def training_outcome(summary: dict[str, Any], output_dir: str) -> str:
    """What was learned and where to look."""
    before, after = summary["eval_before"] or {}, summary["eval_after"] or {}
    changes = [
        f"{function_name(metric)} from {before[metric]:.2f} to {after[metric]:.2f}"
        for metric in after
        if metric in before and is_score(metric)
    ]
    took = f"{summary['optimizer_steps']} optimizer steps ({summary['train_seconds']:.0f} s)"
    learned = f"took held-out {' and '.join(changes)} in {took}" if changes else f"ran {took}"
    directory = Path(output_dir)
    return (
        f"GRPO {learned}. The curve is {directory / 'reward.png'}, every completion with its rewards is in "
        f"{directory / 'completions'}, and the model is {summary['checkpoint']}."
    )


def evaluation_outcome(metrics: dict[str, float], output_dir: str) -> str:
    """Scores with their intervals and where to look."""
    scores = [
        f"{name} {metrics[f'rewards/{name}/mean']:.4f} (95% interval {metrics[f'rewards/{name}/ci_low']:.3f} to "
        f"{metrics[f'rewards/{name}/ci_high']:.3f})"
        for name in map(function_name, filter(is_score, metrics))
    ]
    return (
        f"{metrics['num_samples']:.0f} samples: {', '.join(scores)}. "
        f"Every completion is in {Path(output_dir) / 'evaluation' / 'completions.parquet'}."
    )
