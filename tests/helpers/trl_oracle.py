"""TRL's GRPOTrainer as an oracle: what it makes of given completions, rewards and log-probs.

Its own `_compute_loss` and `_generate_and_score_completions` run unchanged. Completions and rewards come in through its
public `rollout_func` and `reward_funcs`; log-probs replace its forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rl_vlm.algorithm.losses import LossInputs

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` warns at every use


@dataclass(frozen=True)
class Rollouts:
    """Completions in the order of the rows, each with one reward per reward function; None does not apply."""

    completion_ids: list[list[int]] = field(default_factory=list)
    rewards: list[list[float | None]] = field(default_factory=list)
    logprobs: list[list[float]] | None = None
    """The generator's, of each token; the trainer then takes it for vLLM."""


def make_trainer(
    checkpoint: Path,
    output_dir: Path,
    rollouts: Rollouts | None = None,
    num_micro_batches: int = 1,
    rows: Sequence[dict[str, Any]] = ({"prompt": "unused"},),
    **settings: Any,
) -> GRPOTrainer:
    """A trainer on CPU, in train mode, whose optimizer step is 8 completions in `num_micro_batches` equal parts.

    Only its `train()` reads the rows.
    """
    from trl.trainer.grpo_config import GRPOConfig  # takes long: it imports vLLM
    from trl.trainer.grpo_trainer import GRPOTrainer

    rollouts = rollouts or Rollouts(rewards=[[0.0]])

    def rollout(prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": rollouts.completion_ids, "logprobs": rollouts.logprobs}

    def reward_function(index: int):
        return lambda **_: [scores[index] for scores in rollouts.rewards]

    args = GRPOConfig(
        output_dir=str(output_dir), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        per_device_train_batch_size=8 // num_micro_batches, gradient_accumulation_steps=num_micro_batches,
        num_generations=4, **settings,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward_function(index) for index in range(len(rollouts.rewards[0]))],
        args=args,
        train_dataset=Dataset.from_list(list(rows)),
        rollout_func=rollout,
    )
    model.train()
    trainer.use_vllm = rollouts.logprobs is not None
    trainer._last_loaded_step = trainer.state.global_step  # there is no engine that would need the weights
    trainer.current_gradient_accumulation_steps = num_micro_batches
    return trainer


def set_logprobs(trainer: GRPOTrainer, logprobs_NT: Tensor, entropies_NT: Tensor | None = None) -> None:
    """What every forward pass of the trainer finds from now on."""
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs_NT, entropies_NT, None)


def loss_on_logprobs(
    trainer: GRPOTrainer, inputs: LossInputs, num_step_tokens: int, generator_weight: Tensor | None = None
) -> Tensor:
    """TRL's loss of a micro-batch; `num_step_tokens` is the number of unmasked tokens of the generation batch.

    That is the optimizer step, unless the trainer has `steps_per_generation`.
    """
    set_logprobs(trainer, inputs.policy_logprobs_NT, inputs.entropies_NT)
    mask = inputs.mask_NT.long()
    batch = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": torch.ones_like(mask[:, :1]),
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": inputs.advantages_NK,
        "num_items_in_batch": torch.tensor(num_step_tokens),
    }
    if inputs.old_logprobs_NT is not None:
        batch["old_per_token_logps"] = inputs.old_logprobs_NT
    if inputs.ref_logprobs_NT is not None:
        batch["ref_per_token_logps"] = inputs.ref_logprobs_NT
    if generator_weight is not None:
        batch["importance_sampling_ratio"] = generator_weight
    return trainer._compute_loss(trainer.model, batch)


def last_metrics(trainer: GRPOTrainer) -> dict[str, float]:
    """The values that the trainer logged last, by metric name."""
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def generator_weight(trainer: GRPOTrainer, rows: list[dict[str, Any]], old_logprobs: Tensor) -> Tensor:
    """The trainer's weight for its rollouts, (N, T) or (N, 1), where its own forward pass finds the old log-probs."""
    set_logprobs(trainer, old_logprobs)
    return score_rollouts(trainer, rows)["importance_sampling_ratio"]


def score_rollouts(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The trainer's own batch (advantages, masks, model inputs) from one dataset row per completion."""
    return trainer._generate_and_score_completions(rows)


def loss_on_rollouts(
    trainer: GRPOTrainer, rows: list[dict[str, Any]], old_logprobs: Tensor, ref_logprobs: Tensor
) -> Tensor:
    """TRL's loss of its own rollouts, images included, through its model's own forward pass."""
    batch = score_rollouts(trainer, rows)
    batch |= {"old_per_token_logps": old_logprobs, "ref_per_token_logps": ref_logprobs}
    return trainer._compute_loss(trainer.model, batch)
