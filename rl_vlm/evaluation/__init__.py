"""Rollout-only evaluation: sample from held-out prompts and score, without an optimizer.

    rows ─ chunks ─► generate ─► reward ─► unfinished/*.json ─► completions.parquet, summary.json, kept.parquet

The trainer evaluates through the same `Evaluator`, so `rl-vlm eval` on a checkpoint gives the run's own figures.
"""
