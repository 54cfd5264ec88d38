"""A micro-batch makes the host wait for the GPU in no place but those that are listed here."""

from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.plan.tracing.fake import fake_tensors
from rl_vlm.plan.tracing.step import TracedTrainer, models_without_storage
from tests.helpers.builders import make_groups, noise_image
from tests.helpers.host_syncs import HostSyncs, place_on_fake_gpu, pretend_gpu
from tests.tiny.build import build_tiny

IN_TRANSFORMERS = {
    "vision.py:run": "the tower reads the sizes of images to make windows and positions, once a run",
    "policy.py:hidden_of_rows": "the model looks for placeholders to put image features there",
}
AFTER_ALL = {"metrics.py:read_together": "metrics are read once all micro-batches are queued"}
SECTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora_kl": {
        "model": {"use_peft": True, "lora_r": 4, "freeze_vision_tower": True}, "algorithm": {"beta": 0.1},
    },
    "cut": {"memory": {"micro_batch_tokens": 80}},
    "dense": {"memory": {"micro_batch_tokens": 400, "prefix_sharing": "dense"}},
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
def test_micro_batches_wait_for_the_gpu_in_listed_places(
    sections: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = build_tiny("qwen2_5_vl", tmp_path / "model")
    model = {"model_name_or_path": str(checkpoint), **sections.get("model", {})}
    memory = {"micro_batch_tokens": 200, **sections.get("memory", {})}
    rollout = {"num_generations": 4, "max_completion_length": 24}
    config = RunConfig.model_validate(sections | {"model": model, "memory": memory, "rollout": rollout})
    groups = make_groups(checkpoint, [([noise_image(32, 32, seed=i)], [24, 20, 16, 8]) for i in range(3)])
    policy, reference = models_without_storage(config, str(checkpoint), groups)
    pretend_gpu(monkeypatch)
    syncs = HostSyncs()
    with fake_tensors() as live:
        place_on_fake_gpu(policy, reference)
        trainer = TracedTrainer(config, policy, reference, groups, 1, live)
        window = trainer.collector.current(trainer.progress, StepMetrics())
        with syncs:
            trainer.add_logprobs(window.groups, policy, "old_logprobs", StepMetrics())
            trainer.add_logprobs(window.groups, reference, "ref_logprobs", StepMetrics())
            trainer.accumulate_gradients(window, window.step_groups(), StepMetrics())
    assert set(syncs.found) == set(IN_TRANSFORMERS | AFTER_ALL), syncs.found
