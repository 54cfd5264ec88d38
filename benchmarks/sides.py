"""One training pass over one group, done four ways: shared, dense, by TRL, and as the floor.

A training pass is: reference log-probs if `beta` > 0, policy log-probs, loss, backward. Every side starts from the
same weights and completions and leaves gradients under the same parameter names (the floor's are not meaningful).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.flops import Training, Workload
from benchmarks.shapes import (
    Shape,
    build_checkpoint,
    make_group,
    make_image,
    make_observations,
    make_prompt,
    make_trajectories,
    random_policy,
    write_config,
)
from rl_vlm.algorithm.losses import LossInputs, policy_loss
from rl_vlm.algorithm.objective import configured_loss, count_denominators
from rl_vlm.config.schema import RunConfig
from rl_vlm.model.loading import load_policy, lora_config
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import load_reference
from rl_vlm.types import Forward, MicroBatch, Prompt, ScoredGroup, SubGroup, length_mask

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` warns at every use


MOST_ROWS, MOST_TOKENS = 16, 20_000
"""Padded rows of a micro-batch of this project, and tokens of all of its rows."""


@dataclass(frozen=True)
class Setup:
    """The parts common to all sides."""

    shape: Shape
    work: Workload
    training: Training
    checkpoint: Path
    group: ScoredGroup
    device: torch.device | None = None
    """Where models get random weights; None if `checkpoint` has weights, which are loaded on the CPU."""

    @staticmethod
    def build(
        shape: Shape, work: Workload, training: Training, directory: Path, device: torch.device | None = None
    ) -> Setup:
        """Build a fresh checkpoint in `directory` and a group for it. With a `device` it has no weights."""
        if device is None:
            build_checkpoint(shape, directory)
        else:
            write_config(shape, directory)
        group = make_group(make_prompt(directory, work, shape), work)
        if observations := make_observations(directory, work, shape):
            group = make_trajectories(group, observations)
        return Setup(shape, work, training, directory, group, device)

    @property
    def dtype(self) -> str:
        """Return the compute precision: bfloat16 on a GPU."""
        return "bfloat16" if self.device is not None and self.device.type == "cuda" else "float32"

    def policy(self) -> Policy:
        """Make the policy of this project, ready to be trained."""
        config, checkpoint = self.config, str(self.checkpoint)
        if self.device is None:
            return load_policy(config, checkpoint).train()
        return random_policy(config, checkpoint, self.device).train()

    def autocast(self) -> AbstractContextManager[Any]:
        """Run forwards of stock models in the compute precision."""
        device = "cpu" if self.device is None else self.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    @property
    def config(self) -> RunConfig:
        """The configuration of a run of this project."""
        lora = self.training.lora_r
        model: dict[str, Any] = {"model_name_or_path": str(self.checkpoint), "dtype": self.dtype}
        if lora:
            model |= {"use_peft": True, "lora_r": lora, "lora_alpha": 2 * lora, "freeze_vision_tower": True}
        return RunConfig.model_validate(
            {
                "model": model,
                "algorithm": {"beta": self.training.beta, "loss_type": "dapo"},
                "rollout": {
                    "num_generations": self.work.num_generations,
                    "max_completion_length": self.work.path_tokens,
                },
                "memory": {"gradient_checkpointing": self.training.gradient_checkpointing},
            }
        )

    def new_group(self) -> ScoredGroup:
        """Return the group with copies of its prompt and observations, without cached features and positions."""
        prompt = dataclasses.replace(self.group.group.prompt)
        group = dataclasses.replace(self.group, group=dataclasses.replace(self.group.group, prompt=prompt))
        observations = [dataclasses.replace(each) for c in self.group.group.completions for each in c.observations]
        return make_trajectories(group, observations) if observations else group


@dataclass(frozen=True)
class Side:
    """One way to do the pass."""

    model: nn.Module
    losses: Callable[[], Iterable[Tensor]]
    """Everything up to the backward pass, of each micro-batch in turn."""

    def run(self) -> float:
        """Run the whole pass and return its loss. Gradients stay until the next pass."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for loss in self.losses():
            loss.backward()
            total += loss.item()
        return total


def own_side(setup: Setup, shared: bool, bans: bool = True) -> Side:
    """Build the side of this project, on the group-shared row or on one padded row per completion.

    Padded rows are in micro-batches of `MOST_ROWS` and `MOST_TOKENS`, since the activations of more do not fit this
    benchmark's machines.
    Without `bans` placeholder tokens keep their probability as in TRL, so that gradients are equal.
    """
    config, work = setup.config, setup.work
    policy = setup.policy()
    reference = load_reference(config, str(setup.checkpoint), policy, resumed=None)
    for own in [policy, *([reference.frozen] if reference and reference.frozen else [])]:
        own.banned_token_ids = own.banned_token_ids if bans else []
    give_adapters_weights(policy.model)
    parts = [range(work.num_generations)] if shared else dense_parts(work)

    def losses() -> Iterator[Tensor]:
        group = setup.new_group()
        yield from (loss(group, list(members)) for members in parts)

    def loss(group: ScoredGroup, members: list[int]) -> Tensor:
        batch = MicroBatch([SubGroup(group, members)], shared)
        ref_logprobs = reference(Forward(batch)).logprobs_NT if reference else None
        scores = policy(Forward(batch))
        return loss_of(setup, group, members, scores.logprobs_NT, scores.entropies_NT, ref_logprobs)

    return Side(policy.model, losses)


def dense_parts(work: Workload) -> list[range]:
    """Return the numbers of the completions of each micro-batch of padded rows."""
    size = max(1, min(MOST_ROWS, MOST_TOKENS // (work.prompt_tokens + work.path_tokens)))
    count = work.num_generations
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def loss_of(
    setup: Setup,
    group: ScoredGroup,
    members: list[int],
    logprobs_NT: Tensor,
    entropies_NT: Tensor,
    ref_logprobs_NT: Tensor | None = None,
) -> Tensor:
    """Compute the loss of some completions of a group as a run does."""
    algorithm, length = setup.config.algorithm, setup.work.completion_tokens
    mask_NT = length_mask([length] * len(members))
    inputs = LossInputs(
        policy_logprobs_NT=logprobs_NT,
        old_logprobs_NT=None,
        ref_logprobs_NT=ref_logprobs_NT,
        advantages_NK=group.advantages_G[members, None],
        mask_NT=mask_NT,
        entropies_NT=entropies_NT,
    )
    denominators = count_denominators([group], mask_truncated_completions=False)
    token_loss, token_weights = configured_loss(algorithm)
    return policy_loss(inputs, algorithm, token_loss, token_weights(mask_NT, denominators, length))[0]


def plain_side(setup: Setup) -> Side:
    """Build the side of the model's own forward: a row per completion, each with the whole prompt and its pixels.

    Positions are this project's, so that the gradients are equal. Micro-batches are those of padded rows.
    """
    policy, work = setup.policy(), setup.work
    model: Any = policy.transformer

    def losses() -> Iterator[Tensor]:
        group = setup.new_group()
        yield from (loss(group, list(members)) for members in dense_parts(work))

    def loss(group: ScoredGroup, members: list[int]) -> Tensor:
        inputs, completions = plain_inputs(policy, group, members)
        logits = model(**inputs, logits_to_keep=work.completion_tokens + 1).logits[:, :-1]
        logprobs = -nn.functional.cross_entropy(logits.flatten(0, 1), completions.flatten(), reduction="none")
        logprobs = logprobs.view_as(completions)
        return loss_of(setup, group, members, logprobs, torch.zeros_like(logprobs))

    return Side(policy.model, losses)


def plain_inputs(policy: Policy, group: ScoredGroup, members: list[int]) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of the model's forward for some completions, and the tokens of these (N, T)."""
    prompt, number = group.group.prompt, len(members)
    completions = torch.stack([group.group.completions[i].token_ids for i in members])
    positions = policy.family.prompt_positions(policy.transformer, prompt)  # (axes, P)
    later = positions.max() + 1 + torch.arange(completions.shape[1])
    positions = torch.cat([positions, later.expand(len(positions), -1)], dim=1)
    media = {name: values.repeat(number, *[1] * (values.ndim - 1)) for name, values in prompt.mm_inputs.items()}
    rows = {"input_ids": torch.cat([prompt.token_ids.expand(number, -1), completions], dim=1)}
    for name, values in prompt.token_inputs.items():
        rows[name] = torch.cat([values.expand(number, -1), torch.zeros_like(completions)], dim=1)
    return {**rows, **media, "position_ids": positions[:, None].expand(-1, number, -1)}, completions


def trl_side(setup: Setup, output_dir: Path) -> Side:
    """Build the side of TRL's `GRPOTrainer`: sdpa, chunked LM head on completions only, the group in one micro-batch.

    With LoRA on a GPU the frozen weights are in bfloat16, as this project's are.

    The trainer makes its own batch from the same completions and rewards. The reference pass is the call that
    `_generate_and_score_completions` makes.
    """
    from transformers import PreTrainedModel

    trainer = make_trainer(setup, output_dir)
    model: Any = trainer.model
    give_adapters_weights(model)
    image, content = make_image(setup.work, setup.shape), setup.group.group.prompt.sample.messages[0]["content"]
    row = {"prompt": [{"role": "user", "content": content[-1]["text"]}], "image": image}
    batch = trainer._generate_and_score_completions([row] * setup.work.num_generations)
    if setup.work.observed_image_tokens:
        batch |= trl_images(trainer, setup, torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1))
    reference: PreTrainedModel | None = trainer.ref_model

    def loss() -> Tensor:
        with head_on_completions_only(), setup.autocast():
            if setup.training.beta:
                batch["ref_per_token_logps"] = trl_reference_logprobs(trainer, reference or model, batch)
            return trainer.compute_loss(model, batch)

    return Side(model, lambda: [loss()])


def trl_images(trainer: Any, setup: Setup, token_ids: Tensor) -> dict[str, Any]:
    """Return what TRL's batch holds if tools return images: all images of each trajectory, and kinds of tokens by id.

    TRL makes it from its own tool calls alone, and reads no images of a rollout function.
    """
    prompt, completions = setup.group.group.prompt, setup.group.group.completions
    rows = [[prompt, *completion.observations] for completion in completions]
    names = ("pixel_values", "image_grid_thw")
    inputs = {name: torch.cat([each.mm_inputs[name] for row in rows for each in row]) for name in names}
    kinds = (token_ids == trainer._image_pad_token_id).to(token_ids.dtype)
    placed = {name: values.to(token_ids.device) for name, values in inputs.items()}
    return {**placed, "num_images": [len(row) for row in rows], "mm_token_type_ids": kinds}


def make_trainer(setup: Setup, output_dir: Path) -> Any:
    """Build a `GRPOTrainer` in the state that `train()` brings it to, with the group's completions as its rollouts."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    work, training = setup.work, setup.training
    paths = [path for completion in setup.group.group.completions for path in completion.paths]
    sampled = {
        "completion_ids": [path.token_ids.tolist() for path in paths],
        "env_mask": [path.sampled.int().tolist() for path in paths],
    }

    def rollout(prompts: list, trainer: Any) -> dict[str, Any]:
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        return {"prompt_ids": prompt_ids, "logprobs": None, **sampled}

    args = GRPOConfig(
        output_dir=str(output_dir), use_cpu=setup.dtype == "float32", bf16=False, report_to=[],
        num_generations=work.num_generations,
        per_device_train_batch_size=work.num_generations, max_completion_length=work.path_tokens,
        beta=training.beta, loss_type="dapo", gradient_checkpointing=training.gradient_checkpointing,
    )  # fmt: skip
    model = stock_model(setup, setup.dtype if training.lora_r else "float32")
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=[lambda **_: setup.group.rewards_G.tolist()],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "unused"}]),
        rollout_func=rollout,
        peft_config=lora_config(model, setup.config.model) if training.lora_r else None,
    )
    if training.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def stock_model(setup: Setup, dtype: str) -> Any:
    """Make the model of transformers with sdpa and weights of this precision."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": getattr(torch, dtype)}
    if setup.device is None:
        return AutoModelForImageTextToText.from_pretrained(setup.checkpoint, **options)
    with setup.device:
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(setup.checkpoint), **options)


def head_on_completions_only() -> AbstractContextManager[Any]:
    """Make TRL's head select positions as on a GPU inside, in TRL's favour; the kernel stays its own for CPUs.

    Without Triton, as on CPUs, it scores prompts too: six times the work at 1,040 + 200 tokens.
    """
    import trl.trainer.utils

    return mock.patch.object(trl.trainer.utils, "_use_triton", return_value=True)


@torch.no_grad()
def trl_reference_logprobs(trainer: Any, reference: Any, batch: dict[str, Any]) -> Tensor:
    """Compute log-probs of the reference model, or of the policy without its adapter."""
    from trl.models.utils import disable_gradient_checkpointing
    from trl.trainer.utils import use_adapter

    names = "pixel_values image_grid_thw num_images mm_token_type_ids".split()
    adapter = use_adapter(reference, adapter_name=None) if trainer.ref_model is None else nullcontext()
    with adapter, disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            reference,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            **{name: batch[name] for name in names},
        )
    return logprobs


def floor_side(setup: Setup) -> Side:
    """Build the floor, a pass over the same unique tokens in stock calls.

    It has one row of P, k rows of R that see no prompt, vision once, and a plain cross entropy on completions only.
    """
    policy = setup.policy()
    policy.transformer.set_attn_implementation("sdpa")
    reference = load_reference(setup.config, str(setup.checkpoint), policy, resumed=None)
    prompt = setup.group.group.prompt
    completions = torch.stack([c.token_ids for c in setup.group.group.completions]).to(policy.device)

    def loss() -> Tensor:
        with setup.autocast():
            return passes()

    def passes() -> Tensor:
        features = None
        if reference is not None:
            model = (reference.frozen or policy).transformer
            with torch.no_grad(), reference.initial_adapter() if setup.training.lora_r else nullcontext():
                features = stock_features(model, prompt)
                stock_loss(model, prompt, completions, features)
        if features is None or not setup.training.lora_r:  # a frozen tower's features serve both passes
            features = stock_features(policy.transformer, prompt)
        return stock_loss(policy.transformer, prompt, completions, features)

    return Side(policy.model, lambda: [loss()])


def stock_features(model: Any, prompt: Prompt) -> Tensor:
    """Compute image features (image tokens, hidden), without gradients if the tower is frozen."""
    trained = any(p.requires_grad for p in model.model.visual.parameters())
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        pixels, grid = prompt.mm_inputs["pixel_values"], prompt.mm_inputs["image_grid_thw"]
        return model.model.visual(pixels.to(model.device), grid_thw=grid.to(model.device)).pooler_output


def stock_loss(model: Any, prompt: Prompt, completions: Tensor, features: Tensor) -> Tensor:
    """Compute a loss that depends on all unique tokens."""
    token_ids = prompt.token_ids.to(model.device)
    embeddings = model.get_input_embeddings()(token_ids)
    places = (token_ids == model.config.image_token_id).nonzero()[:, 0]
    row = embeddings.index_copy(0, places, features.to(embeddings.dtype))[None]
    prefix = model.model.language_model(inputs_embeds=row, use_cache=False).last_hidden_state
    hidden = model.model.language_model(input_ids=completions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1))
    return nn.functional.cross_entropy(logits, completions.flatten()) + prefix.mean()


def give_adapters_weights(model: nn.Module) -> None:
    """Set the same small random LoRA weights on every side. As initialised, half of an adapter has no gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def differences(ours: Side, peer: Side) -> dict[str, float]:
    """Run one pass of both; return |loss - loss'| and the largest relative difference of a parameter's gradient.

    The latter is norm(g - g') / max(norm(g'), 1e-3 of the largest norm), as in the parity tests. Raises AssertionError
    if not the same parameters have gradients on both sides.
    """
    losses = [side.run() for side in (ours, peer)]
    found, expected = (
        {name: p.grad for name, p in side.model.named_parameters() if p.grad is not None} for side in (ours, peer)
    )
    if found.keys() != expected.keys():
        raise AssertionError(f"other parameters have gradients: {sorted(found.keys() ^ expected.keys())[:5]}")
    floor = 1e-3 * max(float(g.norm()) for g in expected.values())
    errors = [float((found[name] - g).norm() / g.norm().clamp(min=floor)) for name, g in expected.items()]
    return {"loss": abs(losses[0] - losses[1]), "gradient": max(errors)}
