"""Whole runs on one GPU."""

import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

import rl_vlm
from benchmarks.training_phase import forward_backward, make_trainer
from benchmarks.training_phase import train as train_on
from rl_vlm.config.schema import TrainConfig
from rl_vlm.distributed.optim import build_optimizer
from rl_vlm.run.run import train
from tests.helpers.builders import make_groups, noise_image
from tests.helpers.resuming import NUM_STEPS, VARIANTS, assert_same_run, resumed
from tests.helpers.tiny_run import build_checkpoint, make_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KEPT = 2
"""Step of the last checkpoint that a resumed run finds."""


@pytest.mark.parametrize("variant", ["full", "lora_with_reference", "bfloat16", "window"])
def test_a_resumed_run_is_bitwise_the_same(variant: str, tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path / "model")
    straight, copy = tmp_path / "straight", tmp_path / "copy"
    settings = VARIANTS[variant] | {"micro_batch_tokens": 150, "max_steps": NUM_STEPS}
    train(make_config(checkpoint, straight, **settings))
    shutil.copytree(straight, copy)
    for step in range(KEPT + 1, NUM_STEPS + 1):
        shutil.rmtree(copy / f"checkpoint-{step}")
    train(resumed(make_config(checkpoint, copy, **settings)))
    assert_same_run(copy, straight)


def test_micro_batches_do_not_wait_for_the_gpu(tmp_path: Path) -> None:
    """Operators of the package that synchronise, as CUDA tells; those within transformers are not counted.

    Those that autograd runs by itself have no place in the package: `tests/integration/test_host_syncs.py` finds them.
    """
    checkpoint = build_checkpoint(tmp_path / "model")
    trainer = make_trainer(checkpoint, {}, {"micro_batch_tokens": 200})
    groups = make_groups(checkpoint, [([noise_image(32, 32, seed=i)], [24, 20, 16, 8]) for i in range(3)])
    train_on(trainer, groups)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            forward_backward(trainer, groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    paths = [Path(each.filename) for each in found if "synchroniz" in str(each.message)]
    of_ours = Counter(path.name for path in paths if Path(rl_vlm.__file__).parent in path.parents)
    assert of_ours <= Counter(["metrics.py", "tensors.py"])  # one read and one wait, after all of them


def test_updates_are_those_of_adamw_with_weight_decay_of_matrices_alone() -> None:
    """PyTorch's plain loop on the CPU is the reference; here the kernel is fused."""
    train_config = TrainConfig(learning_rate=0.01, weight_decay=0.5)
    shapes, random = [(64, 32), (32,)], torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random) for shape in shapes]
    ours, plain = ([torch.nn.Parameter(w.clone().to(d)) for w in start] for d in ("cuda", "cpu"))
    groups = [{"params": plain[:1], "weight_decay": 0.5}, {"params": plain[1:], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    optimizer = build_optimizer(ours, train_config)
    for _ in range(5):
        for mine, other in zip(ours, plain, strict=True):
            other.grad = torch.randn(other.shape, generator=random)
            mine.grad = other.grad.to(mine.device)
        optimizer.step()
        expected.step()
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), rtol=1e-6, atol=1e-6)
