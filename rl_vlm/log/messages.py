"""Plain lines of the log: facts about a run before its first step, and advice if something looks wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from rl_vlm.config.batches import BatchSizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.log.metrics import function_name, is_score
from rl_vlm.model.quantization import is_in_4bit, num_weights

logger = logging.getLogger(__name__)

TOO_MANY = 0.5
"""Share above which a hint is given."""
HINTS = {
    "completions/clipped_ratio": (
        "of the completions were cut off at max_completion_length, and an answer without its end rarely gets a reward. "
        "Set max_completion_length higher, ask for shorter answers in the prompt, or leave such completions out of the "
        "loss with mask_truncated_completions=true."
    ),
    "frac_reward_zero_std": (
        "of the groups have no advantage other than 0, mostly since all rewards are equal, and teach nothing. This is "
        "normal if nearly all answers are right. Otherwise set num_generations or temperature higher, set "
        "max_resampling_rounds, or train on prompts of medium difficulty, which `rl-vlm eval --keep 0.1..0.9` selects."
    ),
}
"""The sentence that follows a metric's value, by metric."""


class Hints:
    """Logs advice about a metric the first time that it is too high."""

    def __init__(self) -> None:
        self.given: set[str] = set()

    def give(self, line: Mapping[str, Any]) -> None:
        """Log the hints for a line of `metrics.jsonl` that were not given before."""
        for metric, advice in HINTS.items():
            if metric not in self.given and line.get(metric, 0.0) > TOO_MANY:
                self.given.add(metric)
                logger.warning("step %d: %.0f%% %s", line["step"], 100 * line[metric], advice)


def loading_line(config: RunConfig, device: object) -> str:
    """Say which model is loaded, and how."""
    return f"loading the model {config.model.model_name_or_path} ({config.model.precision}, {device})"


def parameters_line(model: nn.Module) -> str:
    """Say how many parameters a model has, and how many of them are trained and in 4 bits."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    quantized = sum(num_weights(p) for p in parameters if is_in_4bit(p))
    line = f"{short_count(sum(map(num_weights, parameters)))} parameters, {short_count(trained)} of them trained"
    return f"{line}, {short_count(quantized)} in 4 bits" if quantized else line


def rows_line(num_rows: int, num_dropped: int) -> str:
    """Say how many rows are trained on."""
    dropped = f"; {num_dropped} more are left out" if num_dropped else ""
    return f"{num_rows} rows of training data{dropped}"


def rows_to_evaluate_line(num_rows: int, num_finished: int) -> str:
    """Say how many rows are evaluated, and how many of them an earlier command has finished."""
    resumed = f", {num_finished} of them finished by an earlier command" if num_finished else ""
    return f"{num_rows} held-out rows{resumed}"


def batch_line(sizes: BatchSizes, num_steps: int) -> str:
    """Describe a step, and say how many steps the run has."""
    processes = "one process" if sizes.world_size == 1 else f"{sizes.world_size} processes"
    window = sizes.steps_per_window * sizes.num_iterations
    reused = f", sampled for {window} steps at once" if window > 1 else ""
    return (
        f"{num_steps} steps of {sizes.prompts_per_step} prompts × {sizes.num_generations} completions{reused}, "
        f"on {processes}"
    )


def held_out_line(step: int, metrics: Mapping[str, float]) -> str:
    """Format the scores of an evaluation within a run."""
    scores = {function_name(name): value for name, value in metrics.items() if is_score(name)}
    if "reward" in metrics and len(scores) != 1:
        scores = {"reward": metrics["reward"], **scores}
    shown = ", ".join(f"{name} {value:.3f}" for name, value in scores.items()) or "no completion has a score"
    return f"held out, {f'after step {step}' if step else 'before training'}: {shown}"


def short_count(number: int) -> str:
    """Format as 532, 40.4K, 7.3M or 8.29B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
