"""Groups that another engine sampled, as the loss of a step sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.algorithm.losses import Denominators
from rl_vlm.algorithm.objective import Objective, configured_loss
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.run.run import Run
from rl_vlm.trainer import Trainer
from rl_vlm.types import Forward, MicroBatch, ScoredGroup
from tests.helpers.builders import gradient_error, take_gradients, whole
from tests.helpers.tiny_run import make_config


@pytest.fixture(scope="module")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(make_config(tiny_checkpoint, tmp_path_factory.mktemp("run"), temperature=0.8))
    yield run
    run.close()


@pytest.fixture(scope="module")
def trainer(run: Run) -> Trainer:
    return run.trainer


@pytest.fixture(scope="module")
def groups(run: Run) -> list[ScoredGroup]:
    return run.collector.collect(run.progress, StepMetrics()).groups


def losses(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, batches: list[MicroBatch], **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Gradients and metrics of a step that another engine than the trained model sampled."""
    step = StepMetrics()
    with monkeypatch.context() as patch:
        for section, values in (("rollout", {"engine": "vllm"}), ("algorithm", settings)):
            for name, value in values.items():
                patch.setattr(getattr(trainer.config, section), name, value)
        form = configured_loss(trainer.config.algorithm)
        objective = Objective(trainer.config, torch.device("cpu"), [], [], Denominators(40.0, 8.0), None, form)
        for batch in batches:
            loss, sums = objective.loss(batch, trainer.policy(Forward(batch)))
            loss.backward()
            step.add_loss_metrics([sums])
    return take_gradients(trainer.policy.transformer), step.reduce(list)


def with_mismatch(groups: list[ScoredGroup], shift: float) -> list[ScoredGroup]:
    """The last completion of each group, by its generator's account, was more probable by `shift` per token."""

    def shifted(scored: ScoredGroup) -> ScoredGroup:
        *others, last = scored.group.completions
        last = replace(last, generator_logprobs=last.generator_logprobs + shift)
        return replace(scored, group=replace(scored.group, completions=[*others, last]))

    return [shifted(scored) for scored in groups]


def test_the_trained_models_own_logprobs_are_no_mismatch(trainer, groups, monkeypatch):
    _, metrics = losses(trainer, monkeypatch, [whole(groups, shared=True)])
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-3)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_gradients_and_metrics_do_not_depend_on_micro_batches(trainer, groups, monkeypatch, mode):
    mismatched = with_mismatch(groups, shift=-0.7)
    settings = {"vllm_importance_sampling_mode": mode}
    gradients, metrics = losses(trainer, monkeypatch, [whole(mismatched, shared=False)], **settings)
    parts = [whole([scored], shared=False) for scored in mismatched]
    cut_gradients, cut_metrics = losses(trainer, monkeypatch, parts, **settings)
    assert gradient_error(cut_gradients, gradients) < 1e-4
    assert cut_metrics == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in metrics.items()}

    uncorrected, _ = losses(trainer, monkeypatch, parts, vllm_importance_sampling_correction=False)
    assert gradient_error(uncorrected, gradients) > 1e-2
