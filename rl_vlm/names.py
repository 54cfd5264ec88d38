"""Names that a run writes itself: columns of the completions files, and metrics. Reward functions use other names.

Columns are written by `log/completions.py` and `evaluation/evaluator.py`. Metrics are written by `trainer.py`,
`run.py`, `rollout/collector.py`, `log/metrics.py` and `algorithm/losses.py`.
"""

COLUMNS = frozenset(
    """
    step group_id sample_id completion_index policy_version prompt completion finish_reason prompt_length
    completion_length image_sizes model_image_sizes reward advantage fault row images
    """.split()
)
COLUMN_PREFIX = "data/"

METRICS = frozenset(
    """
    step epoch loss grad_norm learning_rate entropy kl cispo_clip_ratio reward reward_std frac_reward_zero_std
    step_tokens data_wait_fraction
    """.split()
)
METRIC_PREFIXES = tuple(
    """
    balance/ clip_ratio/ completions/ compute/ eval_ memory/ out_of_memory/ resampling/ reward_faults/ rewards/
    sampling/ skipped_updates/ time/ weight_sync/
    """.split()
)


def is_column(name: str) -> bool:
    """Return whether a run or an evaluation writes a column of this name."""
    return name in COLUMNS or name.startswith(COLUMN_PREFIX)


def is_metric(name: str) -> bool:
    """Return whether a run writes a metric of this name."""
    return name in METRICS or name.startswith(METRIC_PREFIXES)
