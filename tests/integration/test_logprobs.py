"""Which model's log-probs reach the loss, against the forward of the library's own model with the weights in question.

Old log-probs are those of the weights that sampled the window, reference log-probs those of the run's initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.algorithm.losses import LossInputs
from rl_vlm.algorithm.objective import Objective
from rl_vlm.model.families import family_of
from rl_vlm.run.run import Run, train
from rl_vlm.types import MicroBatch, PolicyOutput
from tests.helpers.builders import sharpen
from tests.helpers.changed_losses import recorded_losses
from tests.helpers.stock import stock_logprobs
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import build_checkpoint, make_config

ROUNDING = 2e-5
MOVED = 1e-3
"""How far an optimizer step at least moves some log-prob."""


@dataclass
class Seen:
    """The micro-batches of a run and what the loss was given for each, in order."""

    batches: list[MicroBatch] = field(default_factory=list)
    inputs: list[LossInputs] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    with recorded_losses() as recorded:
        seen, loss = Seen(inputs=recorded.inputs), Objective.loss

        def recorded_loss(objective: Objective, batch: MicroBatch, output: PolicyOutput, *cut: Any) -> Any:
            seen.batches.append(batch)
            return loss(objective, batch, output, *cut)

        monkeypatch.setattr(Objective, "loss", recorded_loss)
        yield seen


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharpen(build_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with an effect, to train on."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    directory = tmp_path_factory.mktemp("adapter")
    get_peft_model(load(checkpoint), lora).save_pretrained(str(directory))
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(directory)
    return directory


def load(checkpoint: Path, adapter: Path | None = None) -> Any:
    """The library's own model, in eval mode."""
    from peft import PeftModel

    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    return (model if adapter is None else PeftModel.from_pretrained(model, str(adapter))).eval()


@torch.no_grad()
def own_logprobs(model: Any, batch: MicroBatch) -> list[Tensor]:
    """The completions' log-probs by the model's own forward, one row at a time."""
    transformer = model.get_base_model() if hasattr(model, "peft_config") else model
    family = family_of(transformer.config)
    banned = family.banned_token_ids(transformer.config)
    return [
        stock_logprobs(transformer, family, subgroup.prompt, completion, banned=banned)
        for subgroup in batch.subgroups
        for completion in subgroup.completions
    ]


def largest_gap(logprobs_NT: Tensor | None, expected: list[Tensor]) -> float:
    assert logprobs_NT is not None
    rows = zip(logprobs_NT.detach(), expected, strict=True)
    return max((row[: len(own)] - own).abs().max().item() for row, own in rows)


@pytest.mark.parametrize(
    "window", [{"num_iterations": 2}, {"gradient_accumulation_steps": 1, "steps_per_generation": 2}], ids=str
)
def test_later_steps_of_a_window_have_the_log_probs_of_the_weights_that_sampled_it(
    window: dict[str, Any], checkpoint: Path, tmp_path: Path, seen: Seen
) -> None:
    train(make_config(checkpoint, tmp_path, **window, max_steps=2))
    first, second = seen.inputs
    assert first.old_logprobs_NT is None  # those of its own forward, by which the ratio is 1
    expected = own_logprobs(load(checkpoint), seen.batches[1])
    assert largest_gap(second.old_logprobs_NT, expected) <= ROUNDING
    assert largest_gap(second.policy_logprobs_NT, expected) > MOVED


@pytest.mark.parametrize("use_peft", in_tiers([False, True], (), {True}))
def test_the_reference_is_the_model_that_the_run_began_with(
    use_peft: bool, checkpoint: Path, tmp_path: Path, seen: Seen
) -> None:
    settings: dict[str, Any] = {"beta": 0.1, "use_peft": use_peft, "max_steps": 3}
    train(make_config(checkpoint, tmp_path, **settings))
    train(make_config(checkpoint, tmp_path, **settings | {"resume_from_checkpoint": "auto", "max_steps": 4}))
    model = load(checkpoint)
    assert_reference_is(model, seen)


def test_the_reference_of_a_run_that_continues_an_adapter_is_that_adapter(
    adapter: Path, checkpoint: Path, tmp_path: Path, seen: Seen
) -> None:
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 3}
    train(make_config(adapter, tmp_path, **settings))
    train(make_config(adapter, tmp_path, **settings | {"resume_from_checkpoint": "auto", "max_steps": 4}))
    model = load(checkpoint, adapter)
    assert_reference_is(model, seen)
    assert largest_gap(seen.inputs[0].ref_logprobs_NT, own_logprobs(load(checkpoint), seen.batches[0])) > MOVED


def assert_reference_is(model: Any, seen: Seen) -> None:
    """Check four steps, of which the last is that of a resumed run. The policy moves away from the first on."""
    assert len(seen.inputs) == 4
    for step, (batch, inputs) in enumerate(zip(seen.batches, seen.inputs, strict=True)):
        expected = own_logprobs(model, batch)
        assert largest_gap(inputs.ref_logprobs_NT, expected) <= ROUNDING
        assert (largest_gap(inputs.policy_logprobs_NT, expected) > MOVED) == (step > 0)


def test_only_training_passes_run_in_train_mode(checkpoint: Path, tmp_path: Path, seen: Seen) -> None:
    """Shown by a layer that computes something else in train mode, as dropout and batch norm do."""
    window = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}
    # The check at the start refuses such a model, which samples from another distribution than it trains.
    run = Run(make_config(checkpoint, tmp_path, **window, use_peft=True, beta=0.1, max_steps=2, verify="off"))
    run.trainer.policy.transformer.model.language_model.norm.register_forward_hook(double_in_training)
    run.run()
    run.close()
    model = load(checkpoint)
    for batch, inputs in zip(seen.batches, seen.inputs, strict=True):
        expected = own_logprobs(model, batch)
        sampled = [completion.generator_logprobs for completion in batch.completions]
        assert max((s - own).abs().max().item() for s, own in zip(sampled, expected, strict=True)) <= ROUNDING
        assert largest_gap(inputs.ref_logprobs_NT, expected) <= ROUNDING
        assert largest_gap(inputs.policy_logprobs_NT, expected) > 0.1
    assert largest_gap(seen.inputs[1].old_logprobs_NT, own_logprobs(model, seen.batches[1])) <= ROUNDING


def double_in_training(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return 2 * output if module.training else output
